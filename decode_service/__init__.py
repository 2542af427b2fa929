"""What a decode worker adds to the engine."""
