"""Layers that fold all tokens into a state, in the place of attention.

A row reads the state in one page and writes it to another one, mostly the same. It may write what
the state was behind some of its tokens to more pages, for later prompts. How tokens are folded in
is the layer's own (`engine.step.attention.Recurrence`); here is where states come from and go.

A row whose state has not folded in just the tokens before it is spoilt, and so is what it writes.
The host hears of it and fails the request. The row computes with zeros meanwhile: NaN would stay in
pages that others get.

The reference for other devices, as `sdpa` is. Kernels (`engine.cuda.states`) do the same in rows
that `prepare` gives them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.paged import PagedStep
from engine.pool.state_pool import SPOILT, StatePool
from engine.step.attention import AttentionBatch, Recurrence, Specs

READ, WRITE, SAVED = 0, 1, 2
"""Columns of the table: pages read and written; then pages saved to, each with its tokens."""


class _Prompt(NamedTuple):
    """A row of several tokens, or the end of a prompt."""

    row: int
    first: int
    """Index of its first token among the step's."""
    start: int
    """Tokens of the sequence before it."""
    pieces: list[tuple[int, list[int]]]
    """Where the row is cut, as tokens of the sequence, and the pages that are written there."""


class RecurrentBackend:
    """`AttentionBackend` of layers with states."""

    name = "recurrent"

    def __init__(self, pool: StatePool, specs: Specs) -> None:
        self._pool = pool
        self._specs = specs

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`. The table is read on the host, once a step."""
        assert batch.is_state, "pages of this group are states"
        self._batch = batch
        table = batch.page_table.cpu()
        device, count = batch.page_table.device, batch.num_decodes
        contexts = torch.from_numpy(batch.context_lens.astype("int64"))
        self._contexts = contexts[:count].to(device)
        saved = table[:, SAVED:].reshape(len(table), -1, 2)
        rows, places = (saved[:count, :, 0] > 0).nonzero(as_tuple=True)
        self._saving = rows.to(device), saved[rows, places, 0].to(device)
        """Decode rows that save their states, and the pages."""
        self.spoilt = torch.zeros(len(batch.query_lens), dtype=torch.bool, device=device)
        """[R]: rows that have found a wrong state in some layer."""
        self._prompts, first = [], count
        for row in range(count, len(batch.query_lens)):
            end, tokens = int(contexts[row]), int(batch.query_lens[row])
            pages: dict[int, list[int]] = {end: [int(table[row, WRITE])]}
            for page, at in saved[row].tolist():
                if page:
                    pages.setdefault(at, []).append(page)
            self._prompts.append(_Prompt(row, first, end - tokens, sorted(pages.items())))
            first += tokens

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`. For queries there are inputs, and for K and V gates. Returns what
        the recurrence makes of each token, [T, ...]."""
        recurrence = self._specs[layer].recurrence
        assert recurrence is not None, "a layer of this group has a state"
        parts, count = [], self._batch.num_decodes
        if count:
            parts.append(self._decode(layer, recurrence, q[:count], k[:count], v[:count]))
        for prompt in self._prompts:
            parts += self._prompt(layer, recurrence, prompt, q, k, v)
        return torch.cat(parts)

    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        raise NotImplementedError("kernels of states compute all tokens")

    def reserve(self, tokens: int, rows: int) -> None:
        """See `PagedAttention`."""
        return

    def prepare(self, step: PagedStep) -> None:
        """Sets the step for kernels. Its page table is that of the group, as `begin` gets it."""
        self.step = step
        rows = len(step.context_lens)
        self.found = torch.zeros(rows, dtype=torch.int32, device=step.context_lens.device)
        """[R]: 1 where a kernel has found a wrong state in some layer."""
        self.chunks: Tensor | None = None
        """Where kernels cut the prompts of the step, once one has asked."""

    def _read(self, layer: int, pages: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """States in pages [B], [B, U, N], and which are spoilt, [B]: they should have folded in
        `tokens` [B]. No page stands for zeros."""
        pool, is_new = self._pool, pages == 0
        states = pool.layer(layer)[pages]
        stamps = pool.stamps(layer)[pages].masked_fill_(is_new[:, None], 0)
        spoilt = (stamps != tokens[:, None]).any(1)
        return states.masked_fill_((is_new | spoilt)[:, None, None], 0.0), spoilt

    def _write(
        self, layer: int, pages: Tensor, states: Tensor, tokens: Tensor, spoilt: Tensor
    ) -> None:
        self._pool.layer(layer)[pages] = states
        stamps = torch.where(spoilt, SPOILT, tokens).int()
        self._pool.stamps(layer)[pages] = stamps[:, None].expand(-1, self._pool.units)

    def _decode(
        self, layer: int, recurrence: Recurrence, inputs: Tensor, first: Tensor, second: Tensor
    ) -> Tensor:
        table, tokens = self._batch.page_table[: len(inputs)], self._contexts
        states, spoilt = self._read(layer, table[:, READ], tokens - 1)
        self.spoilt[: len(inputs)] |= spoilt
        out, states = recurrence.step(states, inputs, first, second)
        self._write(layer, table[:, WRITE], states, tokens, spoilt)
        rows, pages = self._saving
        if len(rows):
            self._write(layer, pages, states[rows], tokens[rows], spoilt[rows])
        return out

    def _prompt(
        self,
        layer: int,
        recurrence: Recurrence,
        prompt: _Prompt,
        inputs: Tensor,
        first: Tensor,
        second: Tensor,
    ) -> list[Tensor]:
        pages = self._batch.page_table[prompt.row, READ : READ + 1]
        states, spoilt = self._read(layer, pages, pages.new_tensor([prompt.start]))
        self.spoilt[prompt.row] |= spoilt[0]
        state, outs, at = states[0], [], prompt.start
        for end, targets in prompt.pieces:
            own = slice(prompt.first + at - prompt.start, prompt.first + end - prompt.start)
            out, state = recurrence.fold(state, inputs[own], first[own], second[own])
            outs.append(out)
            to = pages.new_tensor(targets)
            self._write(layer, to, state.expand(len(to), -1, -1), to.new_tensor([end]), spoilt)
            at = end
        return outs
