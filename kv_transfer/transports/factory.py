"""Transports by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kv_transfer.nccl.transport import NcclTransport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.nixl import NixlTransport
from kv_transfer.transports.null import NullTransport
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import KvTransport, TransportError

TRANSPORTS: dict[str, Callable[[str, PoolMemory], KvTransport]] = {
    "nixl": NixlTransport,
    "nccl": NcclTransport,
    "loopback": LoopbackTransport,
    "null": NullTransport,
}

FROM_SLOTS: dict[str, Callable[[str, PoolMemory, torch.Tensor], KvTransport]] = {
    "nixl": NixlTransport,
    "loopback": LoopbackTransport,
}
"""Transports that can also push pages out of host slots."""


def make_transport(
    name: str,
    agent_name: str,
    pool_tensor: torch.Tensor,
    page_bytes: int,
    num_pages: int,
    slots: torch.Tensor | None = None,
) -> KvTransport:
    """Builds a transport over a pool; call it on the thread that will own it.

    The pool must be contiguous, touched (zeroed) and one plain allocation; the transport keeps it
    alive. `agent_name` must be new at every start of the process. `slots` ([num_slots, slot_bytes]
    uint8, slot_bytes >= page_bytes) is host memory from which pages may be pushed, too; transports
    of FROM_SLOTS alone can do that.

    Raises:
        TransportError: `unknown_transport`, `bad_pool`, `nixl_missing` or `nixl_failed`.
    """
    if name not in TRANSPORTS:
        raise TransportError("unknown_transport", f"{name}; known: {', '.join(TRANSPORTS)}")
    pool = PoolMemory.of(pool_tensor, page_bytes, num_pages)
    if slots is not None and name in FROM_SLOTS:
        return FROM_SLOTS[name](agent_name, pool, slots)
    return TRANSPORTS[name](agent_name, pool)
