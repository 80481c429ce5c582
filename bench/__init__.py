"""The benchmark of `make bench`: all ways to drive vLLM from another process, on the same simulated device, in one run."""
