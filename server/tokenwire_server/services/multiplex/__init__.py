"""The Multiplex RPC: many requests on one stream, with one response message per engine step."""
