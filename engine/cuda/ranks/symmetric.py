"""GPU memory that all ranks of a worker read and write: torch's symmetric memory, no multicast.

Multicast is never asked for: programs that use it can put the GPUs of a host out of service, and
between two GPUs it gains nothing. Torch would use it where it maps memory. Whoever calls
`map_memory` sets TORCH_SYMM_MEM_DISABLE_MULTICAST meanwhile (`engine.cuda.ranks.collective`).

Whether the memory can be mapped is agreed on after each step that may fail on one rank alone. So
all ranks have it, or none.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from engine.memory import gpus_apart

if TYPE_CHECKING:
    from engine.cuda.ranks.shared import Shared

log = logging.getLogger("baton.engine")

HALF_BYTES: Final = 64 << 20
"""Bytes of each of the two halves of a buffer. Larger sums go by NCCL."""
MEET_S: Final = 60.0
"""Ranks wait so long for each other's addresses, seconds."""
_dist: Any = dist
"""torch's stubs lack most of what is used here."""
_meetings = 0
"""Meetings that this process has had."""


class SymmetricMemory:
    """A rank's memory, and its view of that of all others."""

    def __init__(self, shared: Shared, word: Tensor, *kept: Any) -> None:
        """`word`: see `shared_at`. `kept`: what keeps the memory mapped."""
        self.shared = shared
        self._word = word.numpy()
        self._kept = word, kept

    def let_go(self) -> None:
        """Ends every wait of this rank's device for another one, for good. What it computes has no
        meaning any more. No call of CUDA: one may wait for the device, as a kernel that is loaded
        does."""
        self._word[0] = 1


def reachable(ranks: int) -> str:
    """Why the GPUs of so many ranks cannot map each other's memory; empty: they can."""
    apart = gpus_apart(ranks)
    return f"no direct access between GPUs {', '.join(apart)}" if apart else ""


def map_memory(
    store: Any,
    name: str,
    rank: int,
    ranks: int,
    device: torch.device,
    most: Callable[[int], int],
    why: str = "",
) -> SymmetricMemory | None:
    """Maps the memory of all ranks. All call it at once.

    Args:
        store: of the ranks' own, for addresses.
        name: of these ranks. No others in this process had it.
        rank: this one.
        ranks: number of ranks.
        device: this rank's GPU.
        most: the largest of all ranks' numbers.
        why: it cannot be mapped, as all ranks know.

    Returns:
        None if there is none; the log says why.
    """
    own: Tensor | None = None
    memory: SymmetricMemory | None = None
    if not why:
        meetings, programs = most(_meetings), -most(-_programs_of(device))
        own, why = _attempted(lambda: _prepared(meetings, programs, ranks, device))
        if most(own is None):
            why = why or "another rank has no memory for them"
        else:
            memory, why = _attempted(lambda: _met(store, name, rank, ranks, programs, own))
            if most(memory is None):
                memory, why = None, why or "another rank cannot map the memory"
    if memory is None:
        log.warning("sums over ranks go by NCCL: %s", why)
    return memory


def _attempted(do: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, or None and why it failed."""
    try:
        return do(), ""
    except Exception as error:  # Which errors torch raises here, no page of it says.
        return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _prepared(meetings: int, programs: int, ranks: int, device: torch.device) -> Tensor:
    """This rank's memory: its pad, which is all 0, and the two halves of its buffer.

    Torch names what ranks send each other by the number of meetings that a process has had. Rank
    0's process may have had some with other ranks before. A rank that has had fewer makes up for
    them by itself.
    """
    from engine.cuda.ranks.shared import pad_bytes

    while _meetings < meetings:
        name = f"baton-rank-alone-{_meetings}"
        _rendezvous(_allocated(16, device), _dist.HashStore(), name, 0, 1)
    own = _allocated(pad_bytes(programs, ranks) + 2 * HALF_BYTES, device)
    own.zero_()
    torch.cuda.synchronize(device)
    return own


def _met(
    store: Any, name: str, rank: int, ranks: int, programs: int, own: Tensor
) -> SymmetricMemory:
    from engine.cuda.ranks.shared import shared_at

    store.set_timeout(timedelta(seconds=MEET_S))
    handle, group = _rendezvous(own, store, name, rank, ranks)
    bases = [int(base) for base in handle.buffer_ptrs]
    word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    shared = shared_at(rank, bases, programs, HALF_BYTES, own.device, word)
    return SymmetricMemory(shared, word, own, handle, group)


def _allocated(size: int, device: torch.device) -> Tensor:
    make: Any = _symmetric().empty_strided_p2p
    own: Tensor = make((size,), (1,), torch.uint8, device)
    return own


def _rendezvous(own: Tensor, store: Any, name: str, rank: int, ranks: int) -> tuple[Any, Any]:
    """Releases of torch differ in where they look a group up: by its name among process groups, or
    in a list of its own. This one is none that a user's process has."""
    global _meetings
    _meetings += 1
    c10d: Any = _dist.distributed_c10d
    group = c10d.ProcessGroup(store, rank, ranks)
    group._set_group_name(name)
    c10d._register_process_group(name, group)
    _symmetric().set_group_info(name, rank, ranks, store)
    return _symmetric().rendezvous(own, name), group


def _symmetric() -> Any:
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory


def _programs_of(device: torch.device) -> int:
    """Programs of each call: the fewest of all ranks, so no more than any GPU runs at once."""
    from engine.cuda.ranks.shared import MOST_PROGRAMS

    return min(MOST_PROGRAMS, torch.cuda.get_device_properties(device).multi_processor_count)
