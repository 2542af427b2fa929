"""What a prefill worker adds to the engine."""
