"""Which attention backend runs, and why."""

from __future__ import annotations

import logging

from engine.attention.base import AttentionBackend
from engine.attention.sdpa import SdpaBackend
from engine.kv_pool import KvPool

log = logging.getLogger("baton.engine")


class AttentionError(Exception):
    """The backend asked for does not exist or cannot run here."""


def choose_backend(name: str, pool: KvPool, windows: tuple[int | None, ...]) -> AttentionBackend:
    """Builds the backend called `name`, or the best one for the pool's device for "auto".

    Args:
        name: "auto" or "sdpa".
        pool: where K and V live.
        windows: per layer, tokens that a position sees; None: all before it.

    Raises:
        AttentionError: there is no such backend.
    """
    if name not in ("auto", "sdpa"):
        raise AttentionError(f"attention backend {name!r} is not one of auto, sdpa")
    why = "it runs everywhere" if name == "auto" else "asked for"
    log.info("attention: sdpa (%s)", why)
    return SdpaBackend(pool, windows)
