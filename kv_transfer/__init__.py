"""Moving KV pages between processes: the hand-off protocol and its transports. Sees addresses."""
