"""The end of a step in a stage that hands hidden states on: nothing is drawn there."""

from __future__ import annotations

from torch import Tensor

from engine.cuda.ranks.drawing import Draw, HostScores, Logits, Verified, nothing_drawn
from engine.cuda.waiting import Read
from engine.step.plan import ScorePlan
from engine.step.sampling import Masks


class NoSampling:
    """`Drawing` of such a stage."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def warm(self, logits: Tensor, slots: Tensor, verified: Verified) -> None:
        """See `Drawing`."""

    def draw(self, draw: Draw, masks: Masks | None = None) -> Read:
        """See `Drawing`."""
        return nothing_drawn

    def score(self, hidden: Tensor, wanted: ScorePlan, logits_of: Logits) -> HostScores:
        """See `Drawing`."""
        raise NotImplementedError("the last stage has logits")
