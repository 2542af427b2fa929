"""Hooks on the fast path."""
