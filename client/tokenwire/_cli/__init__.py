"""The sub-commands of `tokenwire`; `_command` is the entry point and imports them only where typer is installed."""
