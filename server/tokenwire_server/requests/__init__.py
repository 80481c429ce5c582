"""Requests in flight: admission, registration, abort outcomes, slow readers, and the server's state."""
