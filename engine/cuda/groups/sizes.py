"""The size of a step of an expert group on GPUs, which follows from what all workers ask for:

- where all have decode rows alone that graphs hold, all replay graphs of the largest size;
- else each runs its kernels one by one, for as many tokens as it has.

Either way each brings equally many rows to a layer of experts.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.cuda.steps.shapes import Shapes
from engine.step.dispatch import Asks
from engine.step.plan import StepPlan


class Size(NamedTuple):
    """What the workers of a step have agreed on."""

    rows: int
    """Rows that each brings to a layer of experts."""
    in_graphs: bool
    """Whether they are decode rows, which graphs hold."""


def ask_of(plan: StepPlan, shapes: Shapes) -> list[int]:
    """What a worker asks for: its tokens, and the decode rows of its graph; 0: it has none."""
    shape = shapes.of(plan)
    return [plan.num_tokens, 0 if shape is None or shape.prompt_rows else shape.decodes]


def agreed(asks: Asks) -> Size:
    """What follows from what all have asked for."""
    tokens, rows = zip(*asks.values(), strict=True)
    return Size(max(rows), True) if all(rows) else Size(max(tokens), False)
