"""The gRPC services: one module or package for each."""
