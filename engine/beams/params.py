"""What a request asks of beam search."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EarlyStopping(enum.Enum):
    """When a search ends, once it has as many hypotheses as beams. As in transformers."""

    NO_BETTER = "no_better"
    """When the best beam, scored as if it ended now, is no better than the worst hypothesis."""
    AT_ONCE = "at_once"
    NEVER_BETTER = "never_better"
    """When no beam can become better, however long it grows."""


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A search with `width` beams."""

    width: int
    """At least 1. A finished search has as many hypotheses."""
    length_penalty: float = 1.0
    """A hypothesis of n tokens has the score: sum of log probabilities / n ** length_penalty."""
    early_stopping: EarlyStopping = EarlyStopping.NO_BETTER
    top_logprobs: int | None = None
    """Log probabilities that the client wants of the tokens; see `SamplingParams.top_logprobs`."""

    def kept(self, ends: int) -> int:
        """Candidates that a step keeps over all beams, if `ends` token ids end a sequence: however
        many of them end, as many beams go on."""
        return max(2, 1 + ends) * self.width

    def read(self, ends: int, min_tokens: int) -> int:
        """Top log probabilities that the search reads of each beam. Ids that may not end the
        sequence yet are left out."""
        return self.kept(ends) + (ends if min_tokens else 0)
