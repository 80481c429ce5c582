"""Who may call, and whose requests are whose: TLS, bearer tokens, principals."""
