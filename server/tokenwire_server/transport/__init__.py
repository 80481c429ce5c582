"""The gRPC server: what it listens on, the handlers of its methods, health and reflection."""
