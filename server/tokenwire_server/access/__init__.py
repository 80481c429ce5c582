"""Authentication: TLS, bearer tokens, and the principal of each call."""
