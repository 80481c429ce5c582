"""Conversion between the contract and vLLM: requests in one direction, outputs and engine information in the other."""
