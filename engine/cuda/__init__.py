"""The fast path on NVIDIA GPUs: fused kernels, graphs of the decode step, an executor that never
waits for the device while it launches. `engine.loop.executor` says what an executor is."""
