"""The prefill service: it computes prompts and sends their KV to decode workers."""
