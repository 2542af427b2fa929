"""The engine: model, paged KV pool, scheduling, sampling and the step loop. Runs without gRPC."""
