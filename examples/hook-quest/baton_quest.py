"""Quest: a decode row reads the pages whose keys may match its query best.

The method is that of Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM
Inference" (2024). A page is summarised by the least and the greatest value of each of its keys'
elements, for each layer and KV head, when it is complete or has arrived. A query's product with
any key of the page is at most

    sum over elements of max(q * max, q * min)  =  [q+, q-] . [max, min]

where q+ and q- are the positive and the negative part of q. Each KV head reads the pages with the
best bound of its query heads, the row's first page and its last. The first two layers read
all pages, since they attend to many tokens alike.

Options: `sparse_tokens`, how many tokens a row reads (1,024). A row with no more reads all. A
request may carry its own number as the extension `quest`, in ASCII; 0: it reads all.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.hooks.protocol import (
    AttentionHook,
    ExtensionError,
    HookError,
    HookSite,
    Narrowed,
    OnFailure,
    StepRows,
    Term,
)
from engine.pages.kv_pool import KvPool
from engine.types import Mode, PageIds, Request

LEAST_TOKENS = 256
USUAL_TOKENS = 1024
LEAST_PAGES = 4
DENSE_LAYERS = 2
AT_ONCE = 256
"""Pages that are summarised at once, to bound the copy of their keys."""


class Quest(AttentionHook):
    """See the module. Belongs to one rank, and chooses by that rank's heads."""

    name = "quest"
    chooses_pages = True
    on_failure = OnFailure.LEAVE

    def __init__(self, sparse_tokens: int) -> None:
        self._sparse_tokens = sparse_tokens
        self._layers: dict[int, Tensor] = {}
        """For each sparse layer [num_pages, Hkv, 2 * D]: greatest elements, then least ones."""

    def page_bytes(self, pool: KvPool) -> int:
        layers = max(0, pool.num_layers - DENSE_LAYERS)
        return layers * pool.num_kv_heads * 2 * pool.head_dim * pool.dtype.itemsize

    def attach(self, site: HookSite) -> None:
        pool = self._pool = site.pool
        if self._sparse_tokens < LEAST_PAGES * pool.page_size:
            least = LEAST_PAGES * pool.page_size
            raise HookError(
                f"quest reads whole pages: sparse_tokens must be at least {least} with pages of"
                f" {pool.page_size} tokens"
            )
        if not site.decodes:
            return  # Prompts read all pages.
        shape = pool.num_pages, pool.num_kv_heads, 2 * pool.head_dim
        for layer in range(DENSE_LAYERS, pool.num_layers):
            if site.may_choose(layer):
                self._layers[layer] = torch.zeros(shape, dtype=pool.dtype, device=pool.device)
        self._is_summarised = torch.zeros(pool.num_pages, dtype=torch.bool, device=pool.device)

    def request_began(self, request: Request, extension: bytes | None) -> Term | None:
        tokens = self._sparse_tokens if extension is None else _tokens_of(extension)
        if not tokens or request.mode is Mode.PREFILL:
            return None
        pages = tokens // self._pool.page_size
        if tokens < LEAST_TOKENS or pages < LEAST_PAGES:
            raise ExtensionError("too few tokens")
        # The first row that does not read all stores this token.
        return Term(pages, max(len(request.prompt_ids), pages * self._pool.page_size))

    # -- summaries ------------------------------------------------------------------------------

    def step_began(self, step: StepRows) -> None:
        if self._layers:
            self._is_summarised[self._device(step.written)] = False
            self._summarise(step.arrived)

    def step_ended(self, step: StepRows) -> None:
        if self._layers:
            self._summarise(step.completed)

    def _summarise(self, pages: PageIds) -> None:
        for start in range(0, len(pages), AT_ONCE):
            some = self._device(pages[start : start + AT_ONCE])
            places = self._pool.places(some)
            for layer, summaries in self._layers.items():
                keys, _ = self._pool.gather(layer, places)
                apart = keys.unflatten(1, (len(some), -1))  # [Hkv, pages, page_size, D]
                both = torch.cat((apart.amax(2), apart.amin(2)), dim=-1)
                summaries[some] = both.transpose(0, 1)
            self._is_summarised[some] = True

    # -- choosing -------------------------------------------------------------------------------

    def rows_narrowed(self, step: StepRows) -> Narrowed | None:
        count, size = step.num_decodes, step.page_size
        pages, budgets = -(-step.context_lens[:count] // size), step.terms[:count]
        rows = np.flatnonzero((budgets > 0) & (pages > budgets))
        if not self._layers or not rows.size:
            return None
        counts = budgets[rows]
        self._counts, self._used = self._device(counts)[:, None], self._device(pages[rows])
        self._table = self._device(step.page_table[rows])
        self._most = int(counts.max())
        self._alike = bool((counts == self._most).all())
        columns = torch.arange(self._table.shape[1], device=self._pool.device)
        self._bonus = self._bonus_of(columns)[:, None]
        return Narrowed(rows, counts)

    def _bonus_of(self, columns: Tensor) -> Tensor:
        """[B, P], added to scores: the first page, the last and one without a summary are read in
        any case, and those behind the last never."""
        greatest = torch.finfo(torch.float32).max
        bonus = torch.zeros(self._table.shape, dtype=torch.float32, device=self._pool.device)
        bonus.masked_fill_(~self._is_summarised[self._table], greatest / 4)
        bonus[:, 0] = greatest / 2
        last = self._used[:, None] - 1
        bonus.masked_fill_(columns == last, greatest)
        return bonus.masked_fill_(columns > last, -torch.inf)

    def pages_wanted(self, layer: int, q: Tensor) -> Tensor | None:
        summaries = self._layers.get(layer)
        if summaries is None:
            return None
        scores = self._scores(q, summaries[self._table])
        best = scores.topk(self._most, dim=-1).indices
        if not self._alike:
            # Rows that read fewer pages have places behind them, which nobody reads.
            beyond = torch.arange(self._most, device=q.device) >= self._counts[:, :, None]
            best = best.masked_fill(beyond, self._table.shape[1])
        return best.sort(dim=-1).values

    def _scores(self, q: Tensor, summaries: Tensor) -> Tensor:
        """[B, Hkv, P] of `q` [B, Hq, D] and `summaries` [B, P, Hkv, 2 * D]."""
        both = torch.cat((q.clamp_min(0), q.clamp_max(0)), dim=-1)
        grouped = both.unflatten(1, (summaries.shape[2], -1))  # [B, Hkv, heads of a group, 2 * D]
        bounds = torch.einsum("bhgd,bphd->bhgp", grouped, summaries)
        return bounds.amax(2).float() + self._bonus

    def _device(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._pool.device, non_blocking=True)


def _tokens_of(extension: bytes) -> int:
    if not extension.isdigit() or len(extension) > 9:
        raise ExtensionError("the extension of quest is a number of tokens")
    return int(extension)


def make(options: Mapping[str, str]) -> Quest:
    """Makes the hook. Its one option is `sparse_tokens`."""
    if unknown := set(options) - {"sparse_tokens"}:
        raise HookError(f"quest has no option {min(unknown)}; it has sparse_tokens")
    given = options.get("sparse_tokens", str(USUAL_TOKENS))
    if not given.isdigit() or int(given) < LEAST_TOKENS:
        raise HookError(f"quest: sparse_tokens must be a number of at least {LEAST_TOKENS}")
    return Quest(int(given))
