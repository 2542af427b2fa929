"""The suffix drafter: what followed the same tokens before is likely to follow them again.

It needs no weights. Answers that copy from their prompts (edits of text or code, extraction), and
answers that repeat themselves, are full of runs that the sequence has had before. Prompt lookup
(Saxena 2023) matches n-grams of one size; SuffixDecoding (Oliaro et al. 2024) takes the longest
match, and drafts the more the longer it is. Here the history is the sequence's own: one over
several tenants would show, by its speed, what others have asked.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.speculation.drafter import Drafts
from engine.speculation.tables import SlotTables

LONGEST: Final = 32
"""Most newest tokens that are looked for."""
SHORTEST: Final = 2
"""A match of fewer tokens is chance."""


class SuffixDrafter:
    """Looks for the longest match of the newest tokens in the sequence before them; of several, the
    latest. Drafts what followed it, as many tokens as the match has. A match that overlaps the
    newest tokens is a period, and goes on."""

    name = "suffix"

    def __init__(self, most: int) -> None:
        self.most = most

    def draft(self, tables: SlotTables, slots: Tensor) -> Drafts:
        """See `Drafter`."""
        last = tables.length[slots].long()
        size = int(last.max()) + 1
        history = tables.history[slots, :size]
        at = torch.arange(size, device=history.device)
        matches = at < last[:, None]
        lengths = torch.zeros_like(history, dtype=torch.int64)
        for back in range(LONGEST):
            newest = history.gather(1, (last - back).clamp(min=0)[:, None])
            earlier = pad(history, (back, 0))[:, :size]
            matches &= (earlier == newest) & (at >= back)
            if not matches.any():
                break
            lengths += matches
        longest = lengths.amax(1)
        place = (lengths * size + at).argmax(1)
        distance = (last - place).clamp(min=1)
        ahead = torch.arange(self.most, device=history.device)
        source = place[:, None] + 1 + ahead % distance[:, None]
        ready = longest.clamp(max=self.most).masked_fill(longest < SHORTEST, 0)
        ids = history.gather(1, source.clamp(max=size - 1)).long()
        return Drafts(ids, ready)
