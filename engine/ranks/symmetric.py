"""GPU memory that all ranks of a worker read and write: torch's symmetric memory, no multicast.

Multicast is never asked for: programs that use it can put the GPUs of a host out of service, and
between two GPUs it gains nothing.

Whether the memory can be mapped is agreed on after each step that may fail on one rank alone. So
all ranks have it, or none.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from engine.cuda.ranks.shared import Shared

log = logging.getLogger("baton.engine")

HALF_BYTES: Final = 32 << 20
"""Of each of the two halves of a buffer. Larger sums go by NCCL."""
MEET_S: Final = 60.0
"""Ranks wait so long for each other's addresses, seconds."""
_NAME: Final = "baton-ranks"
_LET_GO: Final = 1 << 62
"""A signal beyond all that are waited for."""
_dist: Any = dist
"""torch's stubs lack most of what is used here."""


class SymmetricMemory:
    """A rank's memory, and its view of that of all others."""

    def __init__(self, shared: Shared, own: Tensor, *kept: Any) -> None:
        """`kept`: what keeps the memory mapped."""
        self.shared = shared
        self._kept = own, kept
        pad_bytes = int(shared.buffers[0] - shared.pads[0])
        self._pad = own[:pad_bytes].view(torch.int64)
        self._let_go = torch.full((len(self._pad),), _LET_GO, dtype=torch.int64, pin_memory=True)
        self._stream = torch.cuda.Stream(own.device)

    def let_go(self) -> None:
        """Ends every wait of this rank's device for another one, for good. What it computes has no
        meaning any more."""
        with torch.cuda.stream(self._stream):
            self._pad.copy_(self._let_go, non_blocking=True)


def reachable(ranks: int) -> str:
    """Why the GPUs of so many ranks cannot map each other's memory; empty: they can."""
    apart = [
        f"{one}-{other}"
        for one in range(ranks)
        for other in range(ranks)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
    return f"no direct access between GPUs {', '.join(apart)}" if apart else ""


def map_memory(
    store: Any, rank: int, ranks: int, device: torch.device, agree: Callable[[bool], bool]
) -> SymmetricMemory | None:
    """Maps the memory of all ranks. All call it at once.

    Args:
        store: of the ranks' own, for addresses.
        rank: this one.
        ranks: number of ranks.
        device: this rank's GPU.
        agree: whether all ranks say yes.

    Returns:
        None if there is none; the log says why.
    """
    if why := reachable(ranks):
        log.warning("sums over ranks go by NCCL: %s", why)
        return None
    own, why = _attempted(lambda: _allocate(ranks, device))
    if not agree(own is not None):
        log.warning("sums over ranks go by NCCL: %s", why or "another rank has no memory for them")
        return None
    memory: SymmetricMemory | None
    memory, why = _attempted(lambda: _meet(store, rank, ranks, own))
    if not agree(memory is not None):
        log.warning("sums over ranks go by NCCL: %s", why or "another rank cannot map the memory")
        return None
    return memory


def _attempted(do: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, or None and why it failed."""
    try:
        return do(), ""
    except Exception as error:  # Which errors torch raises here, no page of it says.
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _allocate(ranks: int, device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    from engine.cuda.ranks.shared import pad_bytes

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    size = pad_bytes(programs_of(ranks), ranks) + 2 * HALF_BYTES
    make: Any = _SymmetricMemory.empty_strided_p2p
    own: Tensor = make((size,), (1,), torch.uint8, device)
    own.zero_()
    torch.cuda.synchronize(device)
    return own


def _meet(store: Any, rank: int, ranks: int, own: Tensor) -> SymmetricMemory:
    from torch._C._distributed_c10d import _SymmetricMemory

    from engine.cuda.ranks.shared import shared_at

    symmetric: Any = _SymmetricMemory
    store.set_timeout(timedelta(seconds=MEET_S))
    # Releases of torch differ in where they look a group up: by its name among process groups, or
    # in a list of its own. It is no group of torch's that a user's process has.
    group = _dist.ProcessGroup(store, rank, ranks)
    group._set_group_name(_NAME)
    c10d: Any = _dist.distributed_c10d
    c10d._register_process_group(_NAME, group)
    symmetric.set_group_info(_NAME, rank, ranks, store)
    handle = symmetric.rendezvous(own, _NAME)
    bases = [int(base) for base in handle.buffer_ptrs]
    shared = shared_at(rank, bases, programs_of(ranks), HALF_BYTES, own.device)
    return SymmetricMemory(shared, own, handle, group)


def programs_of(ranks: int) -> int:
    """Programs of each call: the same on all ranks, and no more than any GPU runs at once."""
    from engine.cuda.ranks.shared import MOST_PROGRAMS

    processors = (
        torch.cuda.get_device_properties(rank).multi_processor_count for rank in range(ranks)
    )
    return min(MOST_PROGRAMS, *processors)
