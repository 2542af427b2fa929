"""What ranks on GPUs do together: sums in memory that the GPUs share, and the end of a step."""
