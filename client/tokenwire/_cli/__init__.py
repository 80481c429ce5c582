"""The sub-commands of `tokenwire`. The entry point, `_command`, imports them, since they need typer."""
