"""What ranks do in memory that their GPUs share; see `engine.cuda.ranks.kernels`."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.cuda.kernels import launch, power_of_2
from engine.cuda.ranks import kernels

TWO_SHOTS_BYTES: Final = 64 << 10
"""From this size of a sum on there are two shots, with more than two ranks. Two ranks read no more
with one shot, which is faster at all sizes that were measured, up to 16 MiB (`bench/README.md`)."""
MOST_PROGRAMS: Final = 128
"""One for each processor of a large GPU."""
SIGNAL_BYTES: Final = 8
_WORDS: Final = 1024
"""Words of a program of `all_gather` at a time."""

Phases = tuple[int, int]
"""The first and the last phase that a launch runs."""


class Shared(NamedTuple):
    """A rank's view of the memory of all."""

    rank: int
    ranks: int
    """Number of ranks."""
    buffers: Tensor
    """[N] int64, where the buffer of each rank is."""
    pads: Tensor
    """[N + 1] int64, where its signals are: int64 by program and rank that comes. Then comes the
    time, nanoseconds, that the rank has waited. Behind the N pads: where this rank's word is."""
    calls: Tensor
    """[G] int64, calls that each program has made."""
    half_bytes: int
    """Bytes of each half of a buffer, a multiple of 16."""

    def fits(self, x: Tensor) -> bool:
        """Whether a call can take `x`."""
        return x.is_contiguous() and x.dim() == 2 and x.nbytes <= self.half_bytes

    def all_reduce(self, x: Tensor, *, two_shots: bool | None = None) -> Tensor:
        """The sum of all ranks' `x`, [T, H], which is overwritten. `two_shots` None: by size."""
        return self._sum(x, x, x, 0.0, self._shots(x, two_shots), adds=False)

    def add_rms_norm(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        two_shots: bool | None = None,
    ) -> Tensor:
        """Adds the sum of all ranks' `x` to `residual` in place; returns the norm of that, which
        overwrites `x`. Both are [T, H]."""
        return self._sum(x, residual, weight, eps, self._shots(x, two_shots), adds=True)

    def gather(self, x: Tensor) -> Tensor:
        """[N, ...], the contiguous `x` of all ranks."""
        out = x.new_empty(self.ranks, *x.shape)
        self._gather(x, out, x.numel(), (0, 1))
        return out

    def barrier(self) -> None:
        """The stream goes on when those of all ranks have come here."""
        self._gather(self.calls, self.calls, 0, (0, 1))

    def waits(self) -> Tensor:
        """[N] int64, the time, nanoseconds, that each rank has waited for others since it started.
        The wait of its last meeting may still be missing."""
        out = torch.empty(self.ranks, dtype=torch.int64, device=self.pads.device)
        place = len(self.calls) * self.ranks * SIGNAL_BYTES
        block = power_of_2(self.ranks)
        launch(kernels.waits_of_ranks, (1,), self.pads, out, place, self.ranks, block, num_warps=1)
        return out

    def _shots(self, x: Tensor, two: bool | None) -> int:
        by_size = self.ranks > 2 and x.nbytes >= TWO_SHOTS_BYTES
        return 2 if (by_size if two is None else two) else 1

    def _sum(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        shots: int,
        *,
        adds: bool,
        phases: Phases | None = None,
    ) -> Tensor:
        rows, size = x.shape
        block = power_of_2(size)
        kernel = kernels.all_reduce_two_shots if shots == 2 else kernels.all_reduce_one_shot
        launch(
            kernel,
            (len(self.calls),),
            *self.tables,
            x,
            residual,
            weight,
            eps,
            self.rank,
            rows,
            self.half_bytes // x.element_size(),
            size,
            self.ranks,
            adds,
            *(phases or (0, shots)),
            block,
            num_warps=max(4, min(16, block // 512)),
        )
        return x

    def _gather(self, x: Tensor, out: Tensor, count: int, phases: Phases) -> None:
        launch(
            kernels.all_gather,
            (len(self.calls),),
            *self.tables,
            x,
            out,
            self.rank,
            count,
            self.half_bytes // x.element_size(),
            self.ranks,
            *phases,
            _WORDS,
        )

    @property
    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """The first arguments of kernels of calls."""
        return self.buffers, self.pads, self.calls


def pad_bytes(programs: int, ranks: int) -> int:
    """Bytes of a rank's signals and of the time that it has waited, a multiple of 16."""
    return -(-(programs * ranks + 1) * SIGNAL_BYTES // 16) * 16


def shared_at(
    rank: int,
    bases: list[int],
    programs: int,
    half_bytes: int,
    device: torch.device,
    word: Tensor,
) -> Shared:
    """The view of a rank. At each rank's base address there are its signals and the time that it
    has waited, all 0, and then the two halves of its buffer. `word`: [1] int64 in pinned memory,
    which the caller keeps; while it is 0, programs wait."""
    ranks = len(bases)
    pads = torch.tensor([*bases, word.data_ptr()], dtype=torch.int64, device=device)
    calls = torch.zeros(programs, dtype=torch.int64, device=device)
    buffers = pads[:ranks] + pad_bytes(programs, ranks)
    return Shared(rank, ranks, buffers, pads, calls, half_bytes)
