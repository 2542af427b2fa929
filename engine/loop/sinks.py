"""Hands events to those who asked for them."""

from __future__ import annotations

import logging

from engine.types import Event, Sink

log = logging.getLogger("baton.engine")


def hand_out(events: list[tuple[Sink, Event]]) -> None:
    """Calls the sinks with their events, in order. Adjacent events of one sink make one call."""
    start = 0
    for end in range(1, len(events) + 1):
        if end < len(events) and events[end][0] == events[start][0]:
            continue
        sink = events[start][0]
        try:
            sink([event for _, event in events[start:end]])
        except Exception:
            log.exception("a sink failed")
        start = end
