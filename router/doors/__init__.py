"""How requests come in: gRPC, and HTTP in `openai`."""
