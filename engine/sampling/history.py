"""The tokens of each slot's sequence so far, on the device, for the penalties.

It belongs to the executor's thread. Only slots of penalised sequences are kept up to date. Other
slots hold old data, which is cleared when a penalised sequence takes the slot.
"""

from __future__ import annotations

import torch
from torch import Tensor


class History:
    """Two tables by slot and token id."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = (max_slots, vocab_size)
        self.counts = torch.zeros(shape, dtype=torch.int32, device=device)
        """Occurrences of a token in the output."""
        self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)

    def reset(
        self,
        slots: Tensor,
        prompt_slots: Tensor,
        prompt_ids: Tensor,
        generated_slots: Tensor,
        generated_ids: Tensor,
    ) -> None:
        """Clears slots and fills in the tokens of their new sequences; see `Resets`."""
        # A number that is set by an index is first copied there, for which the host waits.
        self.counts.index_fill_(0, slots, 0)
        self.in_prompt.index_fill_(0, slots, 0)
        vocab_size = self.in_prompt.shape[1]
        self.in_prompt.view(-1).index_fill_(0, prompt_slots * vocab_size + prompt_ids, 1)
        self.count(generated_slots, generated_ids)

    def count(self, slots: Tensor, token_ids: Tensor, alive: Tensor | None = None) -> None:
        """Adds one to each (slot, token id), as often as the pair occurs; only where `alive`."""
        ones = torch.ones_like(token_ids) if alive is None else alive
        self.counts.index_put_((slots, token_ids), ones.int(), accumulate=True)
