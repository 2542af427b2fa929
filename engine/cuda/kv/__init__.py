"""Kernels that read and write the KV pool, by its precision."""
