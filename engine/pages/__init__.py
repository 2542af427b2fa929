"""The paged KV pool and the prefix cache."""
