"""Load on a tokenwire server, and what it costs: behind `tokenwire bench` and the repository's own benchmark."""
