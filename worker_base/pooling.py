"""Messages about prompts that are pooled, and the engine's records of them."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from baton.worker.v1 import worker_pb2
from engine.pooling.checkpoint import PoolingDefaults
from engine.pooling.requests import Pooled, Pooling, PoolKind

_PACKED: Final = np.dtype("<f4")
_KINDS: Final = {
    worker_pb2.POOL_KIND_LAST: PoolKind.LAST,
    worker_pb2.POOL_KIND_MEAN: PoolKind.MEAN,
    worker_pb2.POOL_KIND_FIRST: PoolKind.FIRST,
}


class PoolTimes(NamedTuple):
    """Facts about a prompt that was pooled; times are Unix nanoseconds."""

    cached_tokens: int
    received_ns: int
    started_ns: int


def pooling_of(message: worker_pb2.Pooling) -> Pooling:
    """Reads what a Submit wants of its prompt's hidden states."""
    kind = _KINDS.get(message.kind, PoolKind.LAST)
    return Pooling(kind, message.normalise, message.dimensions, message.scores)


def pooled_message(attempt_id: bytes, pooled: Pooled, times: PoolTimes) -> worker_pb2.Pooled:
    """Makes the message of a prompt that was pooled."""
    return worker_pb2.Pooled(
        attempt_id=attempt_id,
        values=pooled.values.astype(_PACKED).tobytes(),
        cached_prompt_tokens=times.cached_tokens,
        received_unix_ns=times.received_ns,
        started_unix_ns=times.started_ns,
        ended_unix_ns=pooled.at_ns,
    )


def defaults_message(pooling: PoolingDefaults) -> worker_pb2.PoolingDefaults:
    """Makes the message that says how a model pools."""
    kinds = {kind: value for value, kind in _KINDS.items()}
    return worker_pb2.PoolingDefaults(
        kind=kinds[pooling.kind],
        normalise=pooling.normalise,
        width=pooling.width,
        labels=pooling.labels,
        by_turns=pooling.by_turns,
        only_pools=not pooling.generates,
    )
