"""Pages over NCCL, for experiments."""
