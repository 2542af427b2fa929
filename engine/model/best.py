"""The best token of each row, where ranks have parts of the vocabulary.

Each rank sends rank 0 three numbers a row: the logit of the best token of its part, that token's
id, and whether the part is finite. Whole logits would be as many numbers as the vocabulary has
tokens.

The token is that of an argmax over the whole row. Among equals it is the lowest id: an argmax takes
the first of a part, and then the first part. A row with a NaN yields some token of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.step.collective import Collective

BEST_NUMBERS = 3
"""Numbers a row that a rank sends."""


def best_of_parts(logits: Tensor, first_id: int, collective: Collective) -> tuple[Tensor, Tensor]:
    """Finds the best token of each row together with the other ranks.

    Args:
        logits: [R, P] float32, this rank's part.
        first_id: token id of its first column.
        collective: the ranks.

    Returns:
        The tokens, [R] int64, and whether the rows are finite, [R] bool. They mean nothing on other
        ranks than 0.
    """
    ids = logits.argmax(-1, keepdim=True)
    # A sum is the cheapest pass over a row that finds both NaN and infinity.
    finite = logits.sum(-1, keepdim=True).isfinite()
    # float64 holds each of them exactly.
    own = torch.cat([part.double() for part in (logits.gather(-1, ids), ids + first_id, finite)], 1)
    bests = collective.gather(own, BEST_NUMBERS * collective.size).view(
        len(logits), -1, BEST_NUMBERS
    )
    best, ids, finite = bests.unbind(-1)
    tokens = ids.gather(1, best.argmax(-1, keepdim=True)).squeeze(1).long()
    return tokens, finite.bool().all(1)
