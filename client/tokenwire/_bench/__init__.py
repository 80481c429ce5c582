"""Benchmark runs against a tokenwire server: `tokenwire bench` and the repository's own benchmark use it."""
