"""Attention over the paged pool, behind one protocol."""

from engine.attention.base import AttentionBackend, AttentionBatch, AttentionSpec, Specs
from engine.attention.select import AttentionError, choose_backend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "AttentionError",
    "AttentionSpec",
    "Specs",
    "choose_backend",
]
