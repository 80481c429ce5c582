"""The benchmark of `make bench`: every way to drive vLLM from outside, on the same simulated device, in one run."""
