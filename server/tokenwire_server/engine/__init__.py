"""The engine: the only owner of vLLM's AsyncLLM, and the delivery of its outputs to the requests' sinks."""
