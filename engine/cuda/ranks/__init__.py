"""Sums over the ranks of a worker, in memory that their GPUs share."""
