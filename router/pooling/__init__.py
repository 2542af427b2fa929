"""Prompts that are pooled: embeddings and scores, for every door."""
