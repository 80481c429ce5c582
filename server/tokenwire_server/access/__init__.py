"""Authentication: TLS, bearer tokens, and the principal that a request belongs to."""
