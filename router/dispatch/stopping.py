"""Finds the end of a choice from its tokens alone.

Workers apply the same rules (`engine.stopping`) and report the end after the last token. A worker
may die between the two. Then only the token was reported, and nothing may be generated after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from baton.worker.v1 import worker_pb2


def ending_ids(stopping: worker_pb2.Stopping, eos_ids: Iterable[int]) -> frozenset[int]:
    """Tokens that end a choice after `min_tokens`."""
    ids = frozenset(stopping.token_ids)
    return ids if stopping.ignore_eos else ids.union(eos_ids)


def end_of(
    token_ids: Sequence[int], stopping: worker_pb2.Stopping, eos_ids: Collection[int]
) -> worker_pb2.EndReason.ValueType | None:
    """The reason for which a choice with this output has ended, or None if it goes on."""
    if not token_ids:
        return None
    if len(token_ids) > stopping.min_tokens:
        if not stopping.ignore_eos and token_ids[-1] in eos_ids:
            return worker_pb2.END_REASON_END_OF_SEQUENCE
        if token_ids[-1] in stopping.token_ids:
            return worker_pb2.END_REASON_STOP_TOKEN
    if len(token_ids) >= stopping.max_tokens:
        return worker_pb2.END_REASON_LENGTH
    return None
