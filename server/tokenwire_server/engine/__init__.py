"""What vLLM is to the rest of the server. `arguments`, `multiplex/` and `simulated_device/` use some of its types too."""
