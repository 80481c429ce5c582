"""The gRPC server: listening, method handlers, health and reflection."""
