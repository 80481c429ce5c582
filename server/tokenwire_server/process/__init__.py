"""The server process: command line, startup, readiness, drain and shutdown, and cleanup of child processes."""
