"""Between the contract and vLLM: requests one way, outputs and what is told of the engine the other."""
