"""The doors for requests: gRPC, and HTTP in `openai`."""
