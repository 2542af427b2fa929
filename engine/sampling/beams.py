"""Beams on the device: their scores, and which beam of the step before each goes on from.

In a step of a search, in the device's order:

1. `follow`: leading pages of each row become those of the row's parent, which the step before has
   chosen. All of them are full, so beams share them.
2. the forward pass, and the log probabilities of the likeliest tokens;
3. `choose`, on rank 0: the tokens that go on, as `engine.beams.search` finds them;
4. `keep`, on every rank: beam i of the next step is in slot i, with its token. The page that the
   slot's rows write is its own, and gets what the parent's has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.beams.plan import SearchPlan
from engine.groups.spec import State
from engine.pool.pools import KvPools
from engine.step.plan import StepPlan


class BeamTables:
    """By slot. They belong to the device's thread, or stream."""

    def __init__(
        self,
        max_slots: int,
        pools: KvPools,
        write: Callable[[Tensor, Tensor], None],
        device: torch.device,
    ) -> None:
        """`write`: puts [N] tokens of [N] slots into the token table, int64."""
        self._scores = torch.zeros(max_slots, dtype=torch.float32, device=device)
        self._parents = torch.zeros(max_slots, dtype=torch.int64, device=device)
        self._pools = pools
        self._write = write
        self._device = device

    def follow(self, plan: StepPlan, tables: Sequence[Tensor]) -> None:
        """Changes the page tables of a step, by group: those of its rows, as they are in `plan`."""
        for search in plan.searches:
            if not search.followed:
                continue
            rows, parents = self._upload(search.rows), self._parents[self._upload(search.slots)]
            for group, table in enumerate(tables):
                if isinstance(self._pools.specs[group].kind, State):
                    continue  # Its page is the slot's own.
                first = search.rows[0]
                skipped = int(plan.others[group - 1].skipped[first]) if group else 0
                leading = table[:, : max(0, search.followed - skipped)]
                own, those = rows.to(table.device), rows[parents].to(table.device)
                leading[own] = leading[those]

    def choose(self, search: SearchPlan, ids: Tensor, logprobs: Tensor) -> Tensor:
        """Chooses the beams that go on.

        Args:
            search: the search.
            ids: [S, K] int64, the likeliest tokens of each of the step's draws, best first.
            logprobs: [S, K] float32.

        Returns:
            [2, W] int32: the parent of each beam, and its token.
        """
        slots, draws = self._upload(search.slots), self._upload(search.draws)
        if search.scores is None:
            scores = self._scores[slots]
        else:
            scores = torch.from_numpy(search.scores).to(self._device, non_blocking=True)
        ids, sums = ids[draws], scores[:, None] + logprobs[draws]
        for end in search.ends.tolist():
            sums = sums.masked_fill(ids == end, -torch.inf)
        best = sums.flatten().sort(descending=True, stable=True)
        places = best.indices[: len(search.slots)]
        self._scores[slots] = best.values[: len(search.slots)]
        return torch.stack((places // ids.shape[1], ids.flatten()[places])).int()

    def keep(self, search: SearchPlan, chosen: Tensor) -> None:
        """The beams go on so. `chosen`: of `choose`."""
        slots, (parents, tokens) = self._upload(search.slots), chosen.long()
        self._parents[slots] = parents
        self._write(slots, tokens)
        for pool, moved in zip(self._pools, search.moved, strict=True):
            if moved.size:
                pages = self._upload(moved)
                pool.copy_pages(pages[parents], pages)

    def _upload(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device, non_blocking=True)
