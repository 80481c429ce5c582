"""The tokenwire server: vLLM's AsyncLLM in tokens-only mode behind gRPC.

`docs/architecture.md` describes its packages and the path of a request.
"""
