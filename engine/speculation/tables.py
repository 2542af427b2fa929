"""Tables by slot on the device: what a step must know and the host does not."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.step.plan import Begins, StepPlan


class Columns(NamedTuple):
    """The tokens of B decode rows in a step of width W."""

    slots: Tensor
    """[B] int64"""
    lengths: Tensor
    """[B] int64: tokens in KV before the step."""
    ids: Tensor
    """[B, W] int64: the last token, then the drafts."""
    valid: Tensor
    """[B] int64: leading columns whose draws may count, 0 to W."""


class SlotTables:
    """Columns over S slots, and one more that belongs to nobody. Every rank has them, and all are
    equal.

    For a sequence that decodes:

        KV is stored at positions [0, length)
        history[p] is the token at position p, for p in [0, length]; next is history[length]
    """

    def __init__(
        self, max_slots: int, max_context: int, most: int, vocab_size: int, device: torch.device
    ) -> None:
        rows = max_slots + 1
        self.most = most
        """K: the most drafts of a row."""
        self.vocab_size = vocab_size
        self.device = device
        self.length = torch.zeros(rows, dtype=torch.int32, device=device)
        self.next = torch.zeros(rows, dtype=torch.int32, device=device)
        self.drafts = torch.zeros((rows, most), dtype=torch.int32, device=device)
        self.ready = torch.zeros(rows, dtype=torch.int32, device=device)
        """Drafts that are there."""
        self.prompt_len = torch.zeros(rows, dtype=torch.int32, device=device)
        self.choice = torch.zeros(rows, dtype=torch.int32, device=device)
        self.seed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.history = torch.zeros((rows, max_context), dtype=torch.int32, device=device)

    def begin(self, begins: Begins) -> None:
        """Sequences have got slots."""
        slots = self._upload(begins.slots).long()
        self.length[slots] = self._upload(begins.lens)
        self.prompt_len[slots] = self._upload(begins.prompt_lens)
        self.choice[slots] = self._upload(begins.choices)
        self.seed[slots] = self._upload(begins.seeds)
        self.ready.index_fill_(0, slots, 0)
        firsts = np.cumsum(begins.lens) - begins.lens
        at = np.arange(len(begins.ids)) - np.repeat(firsts, begins.lens)
        places = np.repeat(begins.slots, begins.lens).astype(np.int64) * self.history.shape[1] + at
        self.history.view(-1)[self._upload(places)] = self._upload(begins.ids)

    def write(self, slots: Tensor, tokens: Tensor) -> None:
        """The first token behind the KV of these sequences is known: [N] int64 each."""
        self.next[slots] = tokens.int()
        self.history[slots, self.length[slots].long()] = tokens.int()
        self.ready.index_fill_(0, slots, 0)

    def columns(self, plan: StepPlan) -> Columns:
        """The tokens of a step's decode rows. A column counts only if its draft is there, and if
        its place is before the row's bound. Nothing counts of a row that is shorter than it can be:
        the step that was to begin its sequence has failed, and the length is another's."""
        slots = self._upload(plan.row_slots[: plan.num_decodes]).long()
        bounds = self._upload(plan.context_lens[: plan.num_decodes]).long()
        lengths, width = self.length[slots].long(), plan.width
        ids = torch.cat((self.next[slots, None], self.drafts[slots, : width - 1]), dim=1).long()
        ready = self.ready[slots].long()
        valid = (1 + ready).clamp(max=width).minimum(bounds - lengths).clamp(min=0)
        least = self._upload(plan.positions[: plan.decode_tokens : width]).long()
        valid = valid.masked_fill(lengths < least, 0)
        return Columns(slots, lengths, ids, valid)

    def indices(self, slots: Tensor) -> Tensor:
        """[R] int64: output index of the token that the next draw of each slot yields, from `next`
        in KV."""
        return (self.length[slots] + 1 - self.prompt_len[slots]).long()

    def advance(self, columns: Columns, tokens: Tensor, counts: Tensor) -> None:
        """Appends the leading `counts` [B] of each row's `tokens` [B, W]."""
        slots, width = columns.slots, tokens.shape[1]
        at = columns.lengths[:, None] + 1 + torch.arange(width, device=self.device)
        counts_here = torch.arange(width, device=self.device) < counts[:, None]
        rows = slots[:, None].expand_as(tokens)[counts_here]
        self.history[rows, at[counts_here]] = tokens[counts_here].int()
        last = tokens.gather(1, (counts - 1).clamp(min=0)[:, None]).squeeze(1)
        self.next[slots] = torch.where(counts > 0, last, columns.ids[:, 0]).int()
        self.length[slots] = (columns.lengths + counts).int()
        self.ready.index_fill_(0, slots, 0)

    def set_drafts(self, slots: Tensor, ids: Tensor, ready: Tensor) -> None:
        """Sets the drafts of R slots: `ids` [R, K], of which the leading `ready` [R] are there. One
        that is not in the vocabulary, and what follows it, is dropped."""
        is_token = (ids >= 0) & (ids < self.vocab_size)
        ready = ready.minimum(is_token.long().cumprod(1).sum(1))
        self.drafts[slots] = torch.where(is_token, ids, 0).int()
        self.ready[slots] = ready.int()

    def _upload(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()  # A copy of more than 64 KiB would wait for the device.
        return tensor.to(self.device, non_blocking=True)


def accepted(ids: Tensor, tokens: Tensor, valid: Tensor) -> Tensor:
    """How many leading tokens of each row count: all up to the first that differs from its draft.

    Args:
        ids: [B, W], what was computed: a row's last token, then its drafts.
        tokens: [B, W], what was drawn behind each of them.
        valid: [B], leading columns that may count.

    Returns:
        [B] int64, 0 to W.
    """
    agrees = (tokens[:, :-1] == ids[:, 1:]).long().cumprod(1).sum(1)
    return valid.minimum(1 + agrees)
