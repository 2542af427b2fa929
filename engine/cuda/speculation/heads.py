"""A draft head behind the steps of a GPU, with fused kernels; `engine.eager.heads` has the rule.

A step's tokens are drawn and in the tables when the head begins, so it needs nothing of the host:

1. K and V of all tokens of the step are stored, in pages with the ids of group 0's.
2. A decode step of W tokens a row makes W - 1 drafts of each row. The first one comes from the
   newest token that counts, which no other has to wait for. Each other one is a row of one token.
3. A step of one token a row makes none, since the next step is unlikely to verify any
   (`engine.speculation.measured`). So where drafts do not pay, the head costs two products.

All of this is one graph for each shape. Prompts that end here draft nothing yet: the first step of
their answer has one token that counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.grouped import GroupEnds
from engine.attention.paged import PagedStep
from engine.cuda.mixers.base import RowEnds, StepTokens
from engine.cuda.products import CudaProducts
from engine.cuda.speculation.draft_layers import Entered, HeadParts, draft_layer
from engine.cuda.speculation.head_kernels import DraftRows, begin_rows, follow, keep
from engine.cuda.steps.inputs import StepColumns
from engine.cuda.steps.packing import PackedStep
from engine.cuda.steps.staging import StepStaging
from engine.speculation.tables import SlotTables
from engine.step.plan import StepPlan


class HeadStep(NamedTuple):
    """A step that the model has computed."""

    packed: PackedStep
    inputs: StepColumns
    tapped: Tensor
    """[T, N * H]"""


class FusedHead:
    """See the module. Everything it does is queued on the current stream."""

    name = "head"

    def __init__(
        self,
        parts: HeadParts,
        newest: Tensor,
        tables: SlotTables | None,
        rows: int,
        max_pages: int,
        tokens: int,
    ) -> None:
        """`newest`: the token table. `tables`: None: nothing is drafted. For steps of at most so
        many rows, pages of a row, and tokens in graphs."""
        self._pool, self._longest = parts.pool, parts.module.longest
        self._layer = draft_layer(parts, max_pages * self._pool.page_size)
        self._products = CudaProducts()
        self._newest, self._tables = newest, tables
        self._page_size = self._pool.page_size
        device, dtype = self._pool.device, parts.model.embedding.dtype
        self._tapped = torch.empty(tokens, self._layer.width, dtype=dtype, device=device)
        most = 0 if tables is None else tables.most
        self._places = torch.zeros(3, most, rows, dtype=torch.int32, device=device)
        self._last = torch.zeros(rows, dtype=torch.int32, device=device)
        self._table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)

    def room(self, tokens: int) -> Tensor:
        """[T, N * H] for the taps of a step, at a fixed address if a graph may have so many."""
        if tokens <= len(self._tapped):
            return self._tapped[:tokens]
        return self._tapped.new_empty(tokens, self._layer.width)

    def begin(self, plan: StepPlan, staging: StepStaging) -> None:
        """Hears which pages came, and copies pages. It is rare, and no graph has it."""
        changed = plan.undrafted, plan.copy_source, plan.copy_target
        if not any(pages.size for pages in changed):
            return
        staging.begin()
        undrafted, source, target = (staging.add(pages) for pages in changed)
        staging.upload()
        if len(undrafted):
            # Nothing of another sequence is read there.
            self._pool.data.index_fill_(0, undrafted.long(), 0)
        if len(source):
            self._pool.copy_pages(source.long(), target.long())

    def run(self, step: HeadStep) -> None:
        """Keeps what the layer keeps of a step's tokens, and drafts."""
        shape, inputs, layer = step.packed.shape, step.inputs, self._layer
        drafts = shape.decodes > 0 and shape.width > 1 and self._tables is not None
        behind = self._behind(step, drafts=drafts)
        entered = layer.entered(behind, layer.features(step.tapped))
        tokens = self._tokens(inputs.positions, inputs.stores)
        if drafts:
            self._draft(step, entered, tokens)
        else:
            layer.layers.run(*entered, tokens, RowEnds(self._last[:0], ()))

    def _tokens(self, positions: Tensor, stores: Tensor) -> StepTokens:
        return StepTokens(positions, (stores,), self._layer.groups.attend, {}, None)

    def _draft(self, step: HeadStep, entered: Entered, tokens: StepTokens) -> None:
        """From what a step's tokens begin with. Of B rows the newest token drafts first."""
        shape, layer, tables = step.packed.shape, self._layer, self._tables
        assert tables is not None
        rows, drafted = shape.decodes, layer.drafted
        positions, stores, contexts = self._of_step(rows, shape.width)
        table = self._table[:rows]
        ends: RowEnds | None = RowEnds(self._last[:rows], (GroupEnds(contexts[0], table),))
        for depth in range(shape.width - 1):
            of_rows = rows, contexts[depth], table, None, 0
            layer.groups.prepare([PagedStep(*of_rows, all_fresh=False, differ=shape.differ)])
            final, residual = layer.layers.run(*entered, tokens, ends)
            found = drafted.vocabulary.best(self._products.linear(final, drafted.head, None))[0]
            rest = drafted.total, step.packed.slots, tables, depth
            ids = keep(found, drafted.tokens, *rest)
            if depth + 2 < shape.width:
                entered, ends = layer.entered(ids, residual), None
                tokens = self._tokens(positions[depth + 1], stores[depth + 1])

    def _behind(self, step: HeadStep, *, drafts: bool) -> Tensor:
        """[T] int32, the token behind each; queues what rows need to draft."""
        packed, shape, inputs = step.packed, step.packed.shape, step.inputs
        behind, first = torch.empty_like(inputs.token_ids), shape.decode_tokens
        if drafts:
            assert self._tables is not None
            places = self._of_step(shape.decodes, shape.width)
            into = DraftRows(behind, self._last, *places, self._table)
            known = packed, inputs, self._tables, self._longest, self._page_size
            begin_rows(*known, into)
        elif first:
            follow(-1 - packed.slots, self._newest, behind[:first])
        if packed.prompts is not None:
            assert packed.prompts.behind is not None, "the head is known"
            follow(packed.prompts.behind, self._newest, behind[first:])
        return behind

    def _of_step(self, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Positions, stores and contexts of the places of each row, [W - 1, B]."""
        whole = self._places.view(-1)[: 3 * (width - 1) * rows].view(3, width - 1, rows)
        positions, stores, contexts = whole.unbind(0)
        return positions, stores, contexts
