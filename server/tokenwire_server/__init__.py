"""The tokenwire server: vLLM's AsyncLLM in tokens-only mode behind gRPC.

`docs/architecture.md` has a line for each module and the path of a request. Only `arguments` and the package `engine`
import vLLM.
"""
