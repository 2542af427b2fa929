"""A model's answer in its parts: thinking, content and calls of functions."""
