"""Rules that end a sequence. The router handles stop texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.types import EndReason, StopRules

if TYPE_CHECKING:
    from collections.abc import Iterable


def end_ids(stop: StopRules, eos_ids: Iterable[int]) -> frozenset[int]:
    """Token ids that end a sequence under these rules. The sampler must not draw them before
    `min_tokens`, and `end_reason` ends the sequence at them after that."""
    return stop.token_ids if stop.ignore_eos else stop.token_ids.union(eos_ids)


def end_reason(
    token_id: int, index: int, stop: StopRules, eos_ids: frozenset[int]
) -> EndReason | None:
    """The reason for which the sequence ends with this token, or None if it goes on.

    A token that ends it goes before length, and end of sequence goes before a stop id.

    Args:
        token_id: the token just read.
        index: its index in the sequence's whole output, from 0.
        stop: the request's rules. A token with an index below `min_tokens` ends nothing, so at
            least that many come before the one that ends it. `max_tokens` always holds, and no
            request with more than the context can take is admitted.
        eos_ids: the model's end-of-sequence ids.
    """
    if index >= stop.min_tokens:
        if not stop.ignore_eos and token_id in eos_ids:
            return EndReason.END_OF_SEQUENCE
        if token_id in stop.token_ids:
            return EndReason.STOP_TOKEN
    if index + 1 >= stop.max_tokens:
        return EndReason.LENGTH
    return None
