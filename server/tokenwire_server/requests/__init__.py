"""Live requests: who may add one now, which there are, what became of them."""
