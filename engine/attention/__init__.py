"""Attention over the paged pool, behind one protocol."""

from engine.attention.select import AttentionError, choose_backend

__all__ = ["AttentionError", "choose_backend"]
