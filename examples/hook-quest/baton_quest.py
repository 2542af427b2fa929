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

On a GPU all this is in kernels (`baton_quest_kernels`), and graphs contain the choice. What follows
is the same by PyTorch, for CPUs, and the reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.hooks.protocol import (
    AttentionHook,
    DecodeRows,
    ExtensionError,
    HookError,
    HookSite,
    HookTag,
    Narrowed,
    OnFailure,
    StepRows,
)
from engine.pool.kv_pool import KvPool
from engine.types import Mode, PageIds, Request

LEAST_TOKENS = 256
USUAL_TOKENS = 1024
LEAST_PAGES = 4
DENSE_LAYERS = 2
AT_ONCE = 256
"""Pages that are summarised at once, to bound the copy of their keys."""
GREATEST = torch.finfo(torch.float32).max


class Quest(AttentionHook):
    """See the module. Belongs to one rank, and chooses by that rank's heads."""

    name = "quest"
    chooses_pages = True
    capturable = True
    on_failure = OnFailure.LEAVE

    def __init__(self, sparse_tokens: int) -> None:
        self._sparse_tokens = sparse_tokens
        self._places: dict[int, int] = {}
        """Index of sparse layers, in the summaries."""
        self._kernels: Any = None
        self._choice: Any = None
        """None: there is no GPU."""

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
        layers = [at for at in range(DENSE_LAYERS, pool.num_layers) if site.may_choose(at)]
        if not layers:
            return
        self.graph_pages = self._sparse_tokens // pool.page_size
        self._places = {layer: place for place, layer in enumerate(layers)}
        shape = len(layers), pool.num_pages, pool.num_kv_heads, 2 * pool.head_dim
        self._summaries = torch.zeros(shape, dtype=pool.dtype, device=pool.device)
        """Summaries of each sparse layer, page and head: greatest elements, then least ones."""
        self._is_summarised = torch.zeros(pool.num_pages, dtype=torch.uint8, device=pool.device)
        self._layer_ids = torch.tensor(layers, dtype=torch.int32, device=pool.device)
        if pool.device.type == "cuda":
            self._use(importlib.import_module("baton_quest_kernels"))
            torch.cuda.synchronize(pool.device)  # Steps run on another stream.

    def _use(self, kernels: Any) -> None:
        """Uses kernels, and compiles what single steps need."""
        self._kernels, self._choice = kernels, kernels.Choice()
        nowhere = torch.zeros(1, dtype=torch.int64, device=self._pool.device)
        self._summarise_all(nowhere)
        self._is_summarised.zero_()

    def request_began(self, request: Request, extension: bytes | None) -> HookTag | None:
        tokens = self._sparse_tokens if extension is None else _tokens_of(extension)
        if not tokens or request.mode is Mode.PREFILL:
            return None
        pages = tokens // self._pool.page_size
        if tokens < LEAST_TOKENS or pages < LEAST_PAGES:
            raise ExtensionError("too few tokens")
        # The first row that does not read all stores this token.
        return HookTag(pages, max(len(request.prompt_ids), pages * self._pool.page_size))

    # -- summaries ------------------------------------------------------------------------------

    def step_began(self, step: StepRows) -> None:
        if not self._places:
            return
        if len(written := step.written):
            self._is_summarised.index_fill_(0, self._device(written), 0)
        self._summarise(step.arrived)

    def step_ended(self, step: StepRows) -> None:
        if self._places:
            self._summarise(step.completed)

    def _summarise(self, pages: PageIds) -> None:
        if not len(pages):
            return
        if self._choice is not None:
            self._summarise_all(self._device(pages))
            return
        for start in range(0, len(pages), AT_ONCE):
            some = self._device(pages[start : start + AT_ONCE])
            places = self._pool.places(some)
            for layer, place in self._places.items():
                keys, _ = self._pool.gather(layer, places)
                apart = keys.reshape(
                    len(keys), len(some), -1, keys.shape[-1]
                )  # [Hkv, pages, page_size, D]
                both = torch.cat((apart.amax(2), apart.amin(2)), dim=-1)
                self._summaries[place, some] = both.transpose(0, 1)
            self._is_summarised[some] = 1

    def _summarise_all(self, pages: Tensor) -> None:
        self._kernels.summarise(
            self._pool, pages, self._layer_ids, self._summaries, self._is_summarised
        )

    # -- choosing -------------------------------------------------------------------------------

    def rows_narrowed(self, step: StepRows) -> Narrowed | None:
        count, size = step.num_decodes, step.page_size
        pages, budgets = -(-step.context_lens[:count] // size), step.tags[:count]
        rows = np.flatnonzero((budgets > 0) & (pages > budgets))
        return Narrowed(rows, budgets[rows]) if self._places and rows.size else None

    def choosing_began(self, rows: DecodeRows) -> None:
        self._rows = rows
        if self._choice is not None:
            return
        self._table, counts = rows.table.long(), rows.counts.long()
        self._last = ((rows.contexts.long() - 1) // rows.page_size)[:, None, None]
        columns = torch.arange(self._table.shape[1], device=counts.device)
        self._beyond = columns >= self._last
        self._always = (columns == 0) | ~self._is_summarised[self._table].bool()
        behind = torch.arange(rows.most - 1, device=counts.device)
        self._unread = behind >= counts[:, None, None] - 1

    def pages_wanted(self, layer: int, q: Tensor) -> Tensor | None:
        if (place := self._places.get(layer)) is None:
            return None
        if self._choice is not None:
            chosen: Tensor = self._choice(
                q, self._summaries[place], self._is_summarised, self._rows
            )
            return chosen
        scores = self._scores(q, self._summaries[place][self._table])
        best = scores.topk(self._rows.most - 1, dim=-1).indices
        best = torch.where(self._unread, self._last, best)
        last = self._last.expand(-1, best.shape[1], -1)
        return torch.cat((best, last), dim=-1).sort(dim=-1).values

    def _scores(self, q: Tensor, summaries: Tensor) -> Tensor:
        """[B, Hkv, P] of `q` [B, Hq, D] and `summaries` [B, P, Hkv, 2 * D]. The last page is none
        of those to choose: it is read in any case."""
        both = torch.cat((q.clamp_min(0), q.clamp_max(0)), dim=-1)
        grouped = both.view(
            len(both), summaries.shape[2], -1, both.shape[-1]
        )  # [B, Hkv, heads of a group, 2 * D]
        bounds = torch.einsum("bhgd,bphd->bhgp", grouped, summaries).amax(2).float()
        bounds.masked_fill_(self._always[:, None], GREATEST)
        return bounds.masked_fill_(self._beyond, -torch.inf)

    def _device(self, numbers: np.ndarray) -> Tensor:
        host = torch.from_numpy(numbers.astype(np.int64))
        if self._pool.device.type != "cuda":
            return host.to(self._pool.device)
        return host.pin_memory().to(self._pool.device, non_blocking=True)


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
