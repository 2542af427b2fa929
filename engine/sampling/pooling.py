"""Adds up hidden states on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.step.plan import StepPlan


def pooled_states(plan: StepPlan, hidden: Tensor, *, by_row: bool = False) -> Tensor:
    """Sums of the hidden states that a step's prompts pool.

    Args:
        plan: a step that pools.
        hidden: [T, H] of all tokens; or, `by_row`, [R, H] of the last token of each row.
        by_row: whether there is one for each row, which serves where only last tokens are read.

    Returns:
        [P, H] float32, one for each of the plan's `pools`.
    """
    pools = plan.pools.tolist()
    if by_row:
        rows = torch.tensor([row for _, row, _, _ in pools], device=hidden.device)
        return hidden.index_select(0, rows).float()
    parts = [hidden[first : first + count].float() for _, _, first, count in pools]
    return torch.stack([part.sum(0) if len(part) > 1 else part[0] for part in parts])
