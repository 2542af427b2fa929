"""Ranks on GPUs: rank R has GPU R of those that the worker sees.

Sums go through memory that all GPUs share (`engine.cuda.ranks.symmetric`), where it can be mapped
and is large enough, and else by NCCL. All is queued on the caller's stream, so a graph may contain
it. There is one communicator, and one stream that uses it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from engine.cuda.ranks.symmetric import SymmetricMemory, map_memory, reachable
from engine.eager.collective import LONGEST_S, GroupCollective, at_once, wait
from engine.eager.meeting import Meeting
from engine.step.collective import CollectiveError

if TYPE_CHECKING:
    from engine.cuda.ranks.shared import Shared

_dist: Any = dist
_ENVIRONMENT: Final = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
_APART: Final = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""Where each process sees its own GPU alone, all have the number 0. NCCL has refused one GPU for
two ranks before memory is mapped."""


def nccl_environment(meeting: Meeting) -> dict[str, str]:
    """Variables while a group is made: no multicast, nothing that listens outside its network, and
    none of torch's watchdogs, which end the process. Baton's own one names the rank. Torch's would
    also look for a key in the store for ever, whose folder is gone once all ranks are ready."""
    exact = "" if meeting.on_one_host else "="
    return {**_ENVIRONMENT, "NCCL_SOCKET_IFNAME": f"{exact}{meeting.interface}"}


def nccl_group(
    meeting: Meeting, name: str, rank: int, size: int, most_ctas: int | None = None
) -> Any:
    """A group of NCCL's, with those of the same meeting and name. Its first use connects.
    `most_ctas`: blocks of an operation; None: NCCL chooses."""
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=LONGEST_S)
    if most_ctas is not None:
        options.config.max_ctas = most_ctas
    store = _dist.PrefixStore(name, meeting.store)
    return _dist.ProcessGroupNCCL(store, rank, size, options)


class CudaCollective(GroupCollective):
    """See the module. Before `join` every rank is by itself: memory is measured so."""

    waits_on_host = False

    def __init__(
        self, rank: int, size: int, device: torch.device, *, one_process_sees_all: bool = True
    ) -> None:
        """Not joined yet. `one_process_sees_all`: rank R has GPU R; else nobody knows whose GPU is
        which, and it is seen when the memory is mapped."""
        super().__init__(rank, size)
        self._sees_all = one_process_sees_all
        self._group = None
        self._device = device
        self._memory: SymmetricMemory | None = None
        self._word: Tensor

    @property
    def shared(self) -> Shared | None:
        """The memory of all ranks; None: there is none."""
        return None if self._memory is None else self._memory.shared

    @property
    def path(self) -> str:
        """What sums go through."""
        return "nccl" if self._memory is None else "symmetric memory"

    def join(self, meeting: Meeting) -> None:
        """See `GroupCollective`. The caller's thread may be any."""
        if not _dist.is_nccl_available():
            raise CollectiveError("the PyTorch that is installed has no NCCL: set tp to 1")
        torch.cuda.set_device(self._device)
        apart = {} if self._sees_all else _APART
        with environment(nccl_environment(meeting) | apart):
            self._group = nccl_group(meeting, "nccl", self.rank, self.size)
            self._word = torch.zeros(1, device=self._device)
            self._most(0)  # The first use connects.
            if meeting.on_one_host:
                by_memory = _dist.PrefixStore("memory", meeting.store)
                own = (meeting.name, self.rank, self.size, self._device)
                why = reachable(self.size) if self._sees_all else ""
                self._memory = map_memory(by_memory, *own, self._most, why)
            self.waits()  # It is compiled before the first step.

    def _most(self, own: int) -> int:
        """The largest of all ranks' numbers. Waits for the device."""
        common = torch.full((1,), own, dtype=torch.int32, device=self._device)
        options = at_once(_dist.AllreduceOptions())
        options.reduceOp = _dist.ReduceOp.MAX
        wait(self._group.allreduce([common], options))
        return int(common.item())

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collective`."""
        if self._group is None:
            return x
        if (shared := self.shared) is not None and shared.fits(x):
            return shared.all_reduce(x)
        return super().all_reduce(x)

    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds the sum of all ranks' `x` to `residual` in place; returns the norm of that, which
        overwrites `x`. Both are [T, H]."""
        from engine.cuda.kernels import add_rms_norm

        if (shared := self.shared) is not None and shared.fits(x):
            return shared.add_rms_norm(residual, x, weight, eps)
        return add_rms_norm(residual, self.all_reduce(x), weight, eps)

    def gather_on_all(self, x: Tensor) -> Tensor:
        """[N, R, C], the [R, C] of all ranks, on all of them. Its numbers take 4 bytes each."""
        if (shared := self.shared) is not None and shared.fits(x):
            return shared.gather(x)
        out = x.new_empty(self.size, *x.shape)
        options = at_once(_dist.distributed_c10d.AllgatherOptions())
        wait(self._group._allgather_base(out, x, options))
        return out

    def scatter_sum(self, x: Tensor) -> Tensor:
        """[N R, C] -> [R, C], the sum of all ranks' rows of this one. By NCCL."""
        out = x.new_empty(len(x) // self.size, x.shape[1])
        options = at_once(_dist.ReduceScatterOptions())
        wait(self._group._reduce_scatter_base(out, x, options))
        return out

    def barrier(self) -> None:
        """See `Collective`. The host does not wait."""
        if (shared := self.shared) is not None:
            shared.barrier()
        else:
            super().all_reduce(self._word)

    def waits(self) -> Tensor | None:
        """On rank 0 what `take_waits` takes, as `Shared.waits`. None: nobody knows them, because
        sums go by NCCL."""
        return None if self.rank or self.shared is None else self.shared.waits()

    def take_waits(self, waits: Tensor) -> None:
        """The device has come to the end of a step, and the host has what `waits` returned."""
        self.on_waits(waits.numpy() / 1e9)

    def end_step(self) -> None:
        """See `Collective`. Steps without kernels of ours end on the host, as on a CPU."""
        waits = self.waits()
        torch.cuda.current_stream(self._device).synchronize()
        if waits is not None:
            self.take_waits(waits.cpu())

    def let_go(self) -> None:
        """See `GroupCollective`. What the device still computes has no meaning."""
        if self._memory is not None:
            self._memory.let_go()
        self.close()

    def close(self) -> None:
        """See `GroupCollective`. Graphs that contain its sums must be gone."""
        if self._group is not None:
            with contextlib.suppress(Exception):
                self._group.abort()


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables, and puts them back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
