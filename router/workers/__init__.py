"""The attached workers and the capacity of each."""
