"""Stages on GPUs: hidden states go from GPU to GPU, or through host memory.

They go through memory that the GPUs of all stages map (`engine.cuda.ranks.handing`). What is larger
than a slot of it, and everything where it cannot be mapped or stages are on several hosts, goes by
NCCL, which takes one rank a GPU. Two neighbours have a communicator of their own, made and used
once when they join: one that is made in service waits for a stage that may be busy with something
else. All is queued on the caller's stream, and graphs of steps contain none of it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from engine.cuda.ranks.collective import environment, nccl_environment
from engine.cuda.ranks.symmetric import SymmetricMemory, map_memory
from engine.eager.collective import LONGEST_S, at_once, gloo_group, wait
from engine.eager.meeting import Meeting
from engine.eager.stages import GlooStages
from engine.step.collective import CollectiveError
from engine.step.lanes import lanes_of

if TYPE_CHECKING:
    from engine.cuda.ranks.handing import Ring

log = logging.getLogger("baton.engine")

_dist: Any = dist
RING_BYTES: Final = 512 << 20
"""Bytes of a stage's slots. With two stages there are three: each holds a step of 8,192 tokens of
10,000 numbers."""
_UNSENT: Final = 2
"""Steps whose hidden states may wait to be taken by NCCL. The stage goes on meanwhile."""
_MOST_CTAS: Final = 4
"""Blocks of a send or a receive of NCCL. One that waits for the other stage keeps so many
processors busy. Not tuned: it is 3 of 100 on an H100, where four blocks copy some 80 GB/s."""


class CudaStages:
    """A stage's place in the chain of ranks that have the same place in their stages."""

    waits_on_host = False

    def __init__(self, stage: int, count: int, device: torch.device) -> None:
        """Not joined yet: see `join`."""
        self.is_first = stage == 0
        self.is_last = stage == count - 1
        self._stage, self._count, self._device = stage, count, device
        self._memory: SymmetricMemory | None = None
        self._ring: Ring | None = None
        self._before: Any = None
        self._behind: Any = None
        self._sent: deque[tuple[Any, Tensor]] = deque()

    @property
    def path(self) -> str:
        """What hidden states go through."""
        return "nccl" if self._ring is None else "symmetric memory"

    def join(self, meeting: Meeting) -> None:
        """Meets the other stages; see `GroupCollective.join`. The caller's thread may be any."""
        if not _dist.is_nccl_available():
            raise CollectiveError("the PyTorch that is installed has no NCCL: set pp to 1")
        torch.cuda.set_device(self._device)
        word = torch.zeros(1, device=self._device)
        with environment(nccl_environment(meeting)):
            if not self.is_first:
                self._before = self._pair(meeting, self._stage - 1, 1)
                self._receive_by_nccl(word)
            if not self.is_last:
                self._behind = self._pair(meeting, self._stage, 0)
                self._send_by_nccl(word)
            torch.cuda.current_stream(self._device).synchronize()
            if meeting.on_one_host:
                self._map(meeting)

    def receive(self, x: Tensor) -> Tensor:
        """See `Stages`. The current stream waits."""
        if self._ring is not None and x.nbytes <= self._ring.slot_bytes:
            self._ring.receive(x)
        else:
            self._receive_by_nccl(x)
        return x

    def send(self, x: Tensor) -> None:
        """See `Stages`. It is copied, so the caller may change it."""
        if self._ring is not None and x.nbytes <= self._ring.slot_bytes:
            self._ring.send(x)
        else:
            self._send_by_nccl(x)

    def let_go(self) -> None:
        """Ends every wait of this stage for another one, for good. What the device still computes
        has no meaning."""
        if self._memory is not None:
            try:
                self._memory.let_go()
            except Exception:  # An error of the device stays, and ends all waits with it.
                log.exception("the device of stage %d cannot be told to wait no more", self._stage)
        self.close()

    def close(self) -> None:
        """Stages do nothing together any more."""
        for pair in (self._before, self._behind):
            if pair is not None:
                with contextlib.suppress(Exception):
                    pair.abort()

    def _receive_by_nccl(self, x: Tensor) -> None:
        wait(self._before.recv([x], 0, 0))

    def _send_by_nccl(self, x: Tensor) -> None:
        while len(self._sent) >= _UNSENT:
            wait(self._sent.popleft()[0])
        own = x.clone()
        self._sent.append((self._behind.send([own], 1, 0), own))

    def _pair(self, meeting: Meeting, first: int, rank: int) -> Any:
        """A communicator of the stages `first` and the one behind it, of which this has a rank."""
        store = _dist.PrefixStore(str(first), meeting.store)
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=LONGEST_S)
        options.config.max_ctas = _MOST_CTAS
        return _dist.ProcessGroupNCCL(store, rank, 2, options)

    def _map(self, meeting: Meeting) -> None:
        """Maps the memory of all stages, if that is possible everywhere."""
        from engine.cuda.ranks.handing import Ring

        agreeing = meeting._replace(store=_dist.PrefixStore("agree", meeting.store))
        group = gloo_group(agreeing, self._stage, self._count)

        def most(own: int) -> int:
            common, options = torch.tensor([own]), at_once(_dist.AllreduceOptions())
            options.reduceOp = _dist.ReduceOp.MAX
            wait(group.allreduce([common], options))
            return int(common.item())

        store = _dist.PrefixStore("memory", meeting.store)
        own = (meeting.name, self._stage, self._count, self._device)
        self._memory = map_memory(store, *own, most, RING_BYTES // 2)
        if self._memory is not None:
            slots = lanes_of(self._count, 1).flights
            self._ring = Ring(self._memory.shared, slots)


class HostStages(GlooStages):
    """Stages that share a GPU. Each waits on its host for its device, so one computes at a time,
    and the host's clock does not tell how long it has waited for another stage."""

    waits_on_host = False

    def receive(self, x: Tensor) -> Tensor:
        """See `Stages`."""
        return x.copy_(super().receive(torch.empty_like(x, device="cpu")))

    def send(self, x: Tensor) -> None:
        """See `Stages`. It is copied, so the caller may change it."""
        super().send(x.to("cpu", copy=True))
