"""Hooks in the steps of the fast path: which graph a step may replay, and what is around attention.

A step with narrowed rows replays a graph that contains the calls in which a hook chooses pages, if
there is one of its shape. Else its kernels run one by one, and the same calls are made there.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.attention.paged import PagedAttention
from engine.cuda.hooks.choosing import ChosenAttention
from engine.cuda.steps.packing import reads_of
from engine.cuda.steps.shapes import Shape, Shapes
from engine.hooks.attention import Attend, CalledAttention
from engine.hooks.calling import Failures
from engine.hooks.protocol import DecodeRows, Narrowed
from engine.hooks.steps import StepHooks
from engine.schedule.step import StepPlan


class Hooked(NamedTuple):
    """The hooks of a rank, and attention of rows that they narrow."""

    hooks: StepHooks | None = None
    chosen: ChosenAttention | None = None
    """None: no hook chooses pages."""

    @property
    def graph_pages(self) -> int:
        """See `StepHooks`."""
        return 0 if self.hooks is None else self.hooks.graph_pages

    def capture(self) -> None:
        """See `StepHooks`."""
        if self.hooks is not None:
            self.hooks.capture()

    def check_captured(self) -> None:
        """See `StepHooks`."""
        if self.hooks is not None:
            self.hooks.check_captured()

    def begin(
        self, plan: StepPlan, shapes: Shapes, page_size: int
    ) -> tuple[Shape | None, Narrowed | None]:
        """A step begins. Returns its shape, and the rows that are narrowed."""
        hooks = self.hooks
        narrowed = None if hooks is None else hooks.narrow(plan)
        reads = reads_of(plan, narrowed, page_size)
        shape = shapes.of(plan, reads) if plan.num_tokens else None
        if hooks is None:
            return shape, None
        shape = None if hooks.is_eager(plan) else shape
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
        return self.hooks.end_queued()
