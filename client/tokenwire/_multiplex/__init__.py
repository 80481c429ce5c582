"""The Multiplex call from the caller's side: the call itself, and its two views, step by step and typed."""
