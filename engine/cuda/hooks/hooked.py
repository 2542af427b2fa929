"""Hooks in the steps of the fast path: which graph a step may replay, and what is around attention.

A step with narrowed rows replays a graph that contains the calls in which a hook chooses pages, if
there is one of its shape. Else its kernels run one by one, and the same calls are made there.

Several ranks add up what they have computed, token by token of a padded step. So a step has one
shape on all of them, whatever their hooks say: rank 0 finds it before it sends the step, and the
shape travels with it. A rank whose hook narrows no row there, since it has failed, replays the
graph as well: its rows read all their pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.attention.paged import PagedAttention
from engine.cuda.steps.packing import reads_of
from engine.cuda.steps.shapes import Shape, Shapes
from engine.hooks.attention import Attend, CalledAttention
from engine.hooks.calling import Failures
from engine.hooks.steps import StepHooks
from engine.step.hooks import DecodeRows, HookError, Narrowed
from engine.step.plan import BY_EACH_RANK, NO_SHAPE, StepPlan

if TYPE_CHECKING:
    from engine.cuda.hooks.choosing import ChosenAttention


class HookRanks(Protocol):
    """Several ranks. See `CudaCollective`."""

    rank: int

    def gather_on_all(self, x: Tensor) -> Tensor:
        """[N, R, C], the [R, C] of all ranks, on all of them."""
        ...


class Hooked(NamedTuple):
    """The hooks of a rank, and attention of rows that they narrow."""

    hooks: StepHooks | None = None
    chosen: ChosenAttention | None = None
    """None: no hook chooses pages."""
    ranks: HookRanks | None = None
    """None: this rank is alone."""

    @property
    def graph_pages(self) -> int:
        """See `StepHooks`."""
        return 0 if self.hooks is None else self.hooks.graph_pages

    def check_alike(self, device: torch.device) -> None:
        """All ranks come here before they capture the same graphs.

        Raises:
            HookError: they would not.
        """
        if self.hooks is None or self.ranks is None:
            return
        pages = torch.tensor([[self.graph_pages]], dtype=torch.float32, device=device)
        wanted = self.ranks.gather_on_all(pages).flatten().tolist()
        if len(set(wanted)) > 1:
            words = ", ".join(f"{count:g}" for count in wanted)
            raise HookError(f"the ranks' hooks read {words} pages in graphs: they must be as many")

    def capture(self) -> None:
        """See `StepHooks`."""
        if self.hooks is not None:
            self.hooks.capture()

    def check_captured(self) -> None:
        """See `StepHooks`."""
        if self.hooks is not None:
            self.hooks.check_captured()

    def shaped(self, plan: StepPlan, shapes: Shapes, page_size: int) -> StepPlan:
        """Rank 0 of several is about to send the step to the others."""
        if self.hooks is None:
            return plan
        shape = self._shape(self.hooks, plan, shapes, page_size)
        return replace(plan, shape=NO_SHAPE if shape is None else shapes.all.index(shape))

    def begin(
        self, plan: StepPlan, shapes: Shapes, page_size: int
    ) -> tuple[Shape | None, Narrowed | None]:
        """A step begins. Returns its shape, and the rows that are narrowed."""
        hooks = self.hooks
        if hooks is None:
            return (shapes.of(plan) if plan.num_tokens else None), None
        if plan.shape == BY_EACH_RANK:
            shape = self._shape(hooks, plan, shapes, page_size)
        else:
            shape = self._sent_shape(hooks, plan, shapes)
        hooks.begin(plan, shape.decodes if shape else None)
        if hooks.narrowed is None and shape is not None:
            shape = shape._replace(narrowed=False)  # The hook has failed.
        return shape, hooks.narrowed

    def attend(
        self, attention: PagedAttention, narrowed: DecodeRows | None, *, differ: bool
    ) -> Attend | None:
        """What is around `attention`, which is prepared, in a step. None: nothing."""
        hooks, chosen = self.hooks, None if narrowed is None else self.chosen
        if narrowed is not None and chosen is not None:
            chosen.begin(narrowed, differ=differ)
        if hooks is not None and hooks.is_called:
            return CalledAttention((chosen or attention).attend, hooks)
        return None if chosen is None else chosen.attend

    def end(self, narrowed: Narrowed | None) -> Failures | None:
        """The forward pass is queued."""
        if self.hooks is None:
            return None
        if narrowed is not None and self.chosen is not None:
            self.chosen.note_beyond()
        return self.hooks.end_queued(self.ranks.gather_on_all if self.ranks else None)

    def _shape(
        self, hooks: StepHooks, plan: StepPlan, shapes: Shapes, page_size: int
    ) -> Shape | None:
        """The shape in which this rank's hooks let the step run."""
        narrowed = hooks.narrow(plan)
        if plan.num_tokens == 0 or hooks.is_eager(plan):
            return None
        return shapes.of(plan, reads_of(plan, narrowed, page_size))

    def _sent_shape(self, hooks: StepHooks, plan: StepPlan, shapes: Shapes) -> Shape | None:
        """The shape that rank 0 has sent."""
        shape = None if plan.shape == NO_SHAPE else shapes.all[plan.shape]
        if self.ranks is not None and self.ranks.rank:  # Rank 0 has asked its hooks.
            hooks.narrow(plan)
            if shape is not None:
                hooks.keep_to(hooks.graph_pages if shape.narrowed else 0)
        return shape
