"""Transports by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from kv_transfer.nccl.transport import NcclTransport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import KvTransport, PageGroup, TransportError

TRANSPORTS: dict[str, Callable[[str, PoolMemory], KvTransport]] = {
    "nixl": NixlTransport,
    "nccl": NcclTransport,
    "loopback": LoopbackTransport,
}

FETCHED_BY: Final = frozenset({"nixl", "loopback"})
"""Transports by which workers get pages from each other."""


def make_transport(
    name: str,
    agent_name: str,
    pool_tensor: torch.Tensor,
    groups: Sequence[PageGroup],
) -> KvTransport:
    """Builds a transport over a pool; call it on the thread that will own it.

    The pool must be contiguous, touched (zeroed) and one plain allocation; the transport keeps it
    alive. `agent_name` must be new at every start of the process.

    Raises:
        TransportError: `unknown_transport`, `bad_pool`, `nixl_missing` or `nixl_failed`.
    """
    if name not in TRANSPORTS:
        raise TransportError("unknown_transport", f"{name}; known: {', '.join(TRANSPORTS)}")
    pool = PoolMemory.of(pool_tensor, groups)
    return TRANSPORTS[name](agent_name, pool)
