"""The fast path on NVIDIA GPUs: fused kernels, graphs of the decode step, and an executor that
never waits for the device while it launches. `engine.eager.executor` defines executors."""
