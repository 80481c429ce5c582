"""The only part of the server that imports vLLM, together with `arguments`."""
