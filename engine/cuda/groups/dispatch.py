"""Moves tokens between the workers of an expert group on GPUs of one host.

A step of one is a step of all, and its size is agreed on before it is queued
(`engine.cuda.groups.sizes`). Who has no tokens brings padding alone: a step of padding rows. No
expert computes padding, since it has no weights.

Tokens go through memory that the GPUs share, where they fit (`engine.cuda.groups.moving`), and else
by NCCL. Which it is follows from what was agreed on, so it is the same on all.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cuda.experts.summing import Parts, add_up
from engine.cuda.groups.moving import Rows, fits, gather, scatter
from engine.cuda.groups.sizes import Size, agreed
from engine.cuda.ranks.collective import CudaCollective
from engine.cuda.steps.shapes import Shape, Shapes
from engine.eager.meeting import meeting_in
from engine.model.experts.config import Held
from engine.model.experts.routing import Chosen, held
from engine.step.dispatch import Asks, Dispatched, Turns


class CudaDispatch:
    """See `engine.step.dispatch.Dispatch`. Before `join` this worker moves copies of its own tokens
    in place of the others': memory is measured so."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Not joined yet."""
        self.rank, self.size = rank, size
        self.member: Turns
        """Who knows when a step begins."""
        self.run_padding: Callable[[], None]
        """Queues a step without tokens."""
        self.agreed: Size | None = None
        """Size of the step that is queued now; None: each brings as many rows, as when graphs are
        captured."""
        self._device = device
        self._link = CudaCollective(rank, size, device, one_process_sees_all=False)
        self._is_joined = False
        self._rows = Rows(0)

    # -- the group ------------------------------------------------------------------------------

    def join(self, store: Path) -> None:
        """Meets the other workers. Blocks until all have come."""
        self._link.join(meeting_in(store, self.size))
        self._is_joined = True

    def begin(self, ask: list[int]) -> None:
        """Waits until this worker's step begins. Then it is queued."""
        self.agreed = agreed(self.member.take(ask))

    def end(self) -> None:
        """The step is queued, and its logits are read by what is queued."""
        self.member.done()

    def run_without_tokens(self, asks: Asks) -> None:
        """A step for which this worker has no tokens."""
        self.agreed = agreed(asks)
        self.run_padding()

    def let_go(self) -> None:
        """Ends every wait of this worker's device for another one."""
        self._link.let_go()

    # -- a step ---------------------------------------------------------------------------------

    def shape(self, own: Shape | None, shapes: Shapes) -> Shape | None:
        """The shape of this worker's step, given its own one."""
        if self.agreed is None or not self.agreed.in_graphs:
            return None
        assert own is not None, "it has asked for one"
        return shapes.grown(own, self.agreed.rows)

    def open(self, tokens: int, slots: Tensor | None = None, nobody: int = 0) -> None:
        """The layers of a step follow.

        Args:
            tokens: of this worker, with padding.
            slots: of each of them; None: none is padding.
            nobody: the slot of padding.
        """
        self._rows = Rows(tokens if self.agreed is None else self.agreed.rows, slots, nobody)

    def add(self, without_tokens: Callable[[], None]) -> None:
        """See `Dispatch`. Steps of padding run without tokens."""

    def gather(self, x: Tensor, chosen: Chosen, count: int) -> tuple[Tensor, Chosen]:
        """Rows of all workers, and which of the `count` experts here they take; see
        `engine.cuda.groups.moving.gather`."""
        shared = self._link.shared
        if shared is not None and fits(shared, x, self._rows.each, chosen.experts.shape[1]):
            return gather(shared, x, chosen, self._rows, count)
        rows, weights, experts = self.dispatch(x, *chosen)
        own = held(Chosen(weights, experts), count, Held(self.rank, self.size))
        return rows, Chosen(own.weights, torch.where(own.weights == 0, count, own.experts).int())

    def scatter(self, parts: Parts, tokens: int) -> Tensor:
        """What the experts here made of all rows -> [T, H]; see
        `engine.cuda.groups.moving.scatter`."""
        shared = self._link.shared
        chosen = parts.weights.shape[1]
        if shared is not None and fits(shared, parts.parts, self._rows.each, chosen):
            return scatter(shared, parts, tokens, self._rows.each)
        out, beside = self.combine(add_up(parts._replace(shared=None)))[:tokens], parts.shared
        if beside is None:
            return out
        own = beside.out
        if beside.gate is not None:
            own = torch.sigmoid(F.linear(beside.x, beside.gate)) * own
        return out + own

    def dispatch(self, x: Tensor, weights: Tensor, experts: Tensor) -> Dispatched:
        """See `Dispatch`. Each worker has equally many rows; padding has no weights."""
        if not self._is_joined:
            given = (x, weights, experts)
            return Dispatched(*(each.repeat(self.size, 1) for each in given))
        _, slots, nobody = self._rows
        if slots is not None:
            weights = weights * (slots != nobody)[:, None]
        behind = 0, 0, 0, self._rows.each - len(x)
        own = (F.pad(each, behind) for each in (x, weights, experts))
        return Dispatched(*(self._link.gather_on_all(each).flatten(0, 1) for each in own))

    def combine(self, out: Tensor) -> Tensor:
        """See `Dispatch`. The sums of padding come last."""
        return self._link.scatter_sum(out) if self._is_joined else out[: len(out) // self.size]
