"""How hidden states go through the stages of a model, and tokens back.

Every stage runs the same steps in one order. For each step it takes the hidden states of the stage
before it, runs its layers, and hands on what they make. A step without tokens hands on one row: it
means that the step is done so far, so a step that has ended in the last stage has ended in all of
them.

The last stage hands the tokens that it draws to the first one (`engine.step.feedback`). That is a
ring, but a step waits for earlier ones alone, and nobody waits until what it has handed on is
taken. So no stage waits for ever while all of them live.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Stages(Protocol):
    """A stage of a pipeline. Where another one is gone, an operation raises CollectiveError."""

    is_first: bool
    """It has the embedding."""
    is_last: bool
    """It has the last norm and the head."""
    waits_on_host: bool
    """Whether the caller waits for the other stages, and not its device."""

    def receive(self, x: Tensor) -> Tensor:
        """Overwrites `x` with what the stage before hands on, or the last one to the first."""
        ...

    def send(self, x: Tensor) -> None:
        """Hands `x` on, from the last stage to the first. The caller must not change it
        afterwards."""
        ...


class OneStage:
    """There are no others."""

    is_first = is_last = waits_on_host = True

    def receive(self, x: Tensor) -> Tensor:
        """See `Stages`."""
        return x

    def send(self, x: Tensor) -> None:
        """See `Stages`."""
