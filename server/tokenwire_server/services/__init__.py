"""The gRPC services, one module or package each, and the calls and sinks that they share."""
