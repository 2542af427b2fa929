"""Attention over the paged pool, behind one protocol."""

from engine.attention.base import AttentionBackend, AttentionBatch
from engine.attention.select import AttentionError, choose_backend

__all__ = ["AttentionBackend", "AttentionBatch", "AttentionError", "choose_backend"]
