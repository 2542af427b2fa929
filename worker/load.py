"""A worker's load report, with its credit: how much more prefill work it would take on."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Final, NamedTuple

from baton.worker.v1 import worker_pb2
from engine.loads import AdapterLoad
from engine.types import EngineLoad
from prefixes.keys import short_key
from serving.wire import MOST_ADAPTERS

STEPS_OF_CREDIT: Final = 2
"""A worker takes prompts on for this many steps: one runs, the next is planned."""
UNGRANTED_SHARE: Final = 0.25
"""Prompts without a grant may fill this share of the pool: their KV cannot leave yet."""


class Report(NamedTuple):
    """A load report before each router's own part is added to it."""

    load: worker_pb2.Load
    requests: Container[bytes]
    """Attempts in the engine. The report's counts contain them."""


class PrefillRoom(NamedTuple):
    """The bounds of the prompts that a worker takes on, in tokens."""

    queued: int
    """Taken on and not computed yet."""
    ungranted: int
    """Taken on without a grant so far."""
    step: int
    """Most prompt tokens of one step."""
    page: int
    """Tokens in a page."""


def prefill_credit(load: EngineLoad, room: PrefillRoom) -> int:
    """Prompt tokens that the worker would take on beyond those queued.

    It is the least of three: the rest of two steps, the rest of the quarter of the pool for prompts
    without a grant, and the rest of the pages that are free or can be evicted. While there is any
    credit a prompt of any length may be begun, so the credit can fall below 0.
    """
    pool_tokens = load.total_pages * room.page
    free_tokens = (load.free_pages + load.evictable_pages) * room.page
    return min(
        STEPS_OF_CREDIT * room.step - room.queued,
        int(UNGRANTED_SHARE * pool_tokens) - room.ungranted,
        free_tokens - room.queued,
    )


def load_message(
    load: EngineLoad,
    room: PrefillRoom,
    *,
    draining: bool,
    peers: Sequence[worker_pb2.PeerHealth] = (),
    fetch_latency_s: float = 0.0,
    page_sequence: int = 0,
) -> worker_pb2.Load:
    """Makes the load report."""
    return worker_pb2.Load(
        progress=load.progress,
        queued_prefill_tokens=max(0, room.queued),
        waiting_requests=load.waiting_requests,
        running_sequences=load.running_sequences,
        max_sequences=load.max_sequences,
        total_pages=load.total_pages,
        free_pages=load.free_pages,
        evictable_pages=load.evictable_pages,
        granted_pages=load.granted_pages,
        quarantined_pages=load.quarantined_pages,
        prefill_credit_tokens=prefill_credit(load, room),
        step_ms=load.step_ms,
        long_step_ms=load.long_step_ms,
        draining=draining,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        prefill_rate_age_s=load.prefill_rate_age_s,
        prefill_token_s=load.prefill_token_s,
        prefill_context_s=load.prefill_context_s,
        piece_delay_ms=load.piece_delay_ms,
        piece_tokens=load.piece_tokens,
        load_gigabytes_per_s=load.tiers.bytes_per_s.get("load", 0.0) / 1e9 if load.tiers else 0.0,
        fetch_latency_ms=fetch_latency_s * 1e3,
        wanted_pages=load.wanted_pages,
        wanted_sequences=load.wanted_sequences,
        peers=peers,
        page_sequence=page_sequence,
        computed_prompt_tokens=load.prompt_tokens_computed,
        adapters=None if load.adapters is None else _places(load.adapters),
    )


def _places(load: AdapterLoad) -> worker_pb2.AdapterPlaces:
    return worker_pb2.AdapterPlaces(
        in_slots=map(short_key, load.resident[:MOST_ADAPTERS]),
        idle_slots=load.idle_slots,
        wait_ms=load.recent_wait_s * 1e3,
        all_in_host=load.in_host is None,
        in_host=map(short_key, (load.in_host or ())[:MOST_ADAPTERS]),
    )
