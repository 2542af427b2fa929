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

from engine.attention.paged import PagedAttention, PagedStep
from engine.cuda import feed_forward, kernels
from engine.cuda.kv.fp8_store import rope_store_fp8
from engine.cuda.kv.rope_store import rope_store
from engine.cuda.mixers.attention import RopeTables
from engine.cuda.products import CudaProducts
from engine.cuda.speculation.head_kernels import DraftRows, begin_rows, enter, follow, keep
from engine.cuda.steps.inputs import StepColumns
from engine.cuda.steps.packing import PackedStep
from engine.cuda.steps.staging import StepStaging
from engine.model.drafts.eagle3 import Eagle3
from engine.model.precision.dense import Dense
from engine.pool.kv_pool import KvPool
from engine.speculation.tables import SlotTables
from engine.step.plan import StepPlan


class HeadParts(NamedTuple):
    """What a head on a GPU is made of."""

    module: Eagle3
    pool: KvPool
    """The pool of its K and V."""
    attention: PagedAttention
    """Over it."""


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
        self._head, self._pool, self._attention = parts
        self._products = CudaProducts()
        self._head.finish(self._products)
        qkv = self._head.attention.qkv.method
        assert isinstance(qkv, Dense), "a head is not quantised"
        self._kept_rows = qkv.weight[self._head.attention.heads[0] * self._pool.head_dim :]
        """What makes K and V, without q."""
        self._newest, self._tables = newest, tables
        self._page_size = self._pool.page_size
        device, hidden = self._pool.device, self._head.config.layer.hidden_size
        self._width = len(self._head.taps) * hidden
        dtype = self._head.head_weight.dtype
        self._tapped = torch.empty(tokens, self._width, dtype=dtype, device=device)
        own, dim = self._head.attention.own, self._pool.head_dim
        ropes = RopeTables(self._head.ropes, self._tapped, max_pages * self._page_size)
        self._rope = ropes.of(own.rope, dim)
        self._store = rope_store_fp8 if self._pool.precision == "fp8" else rope_store
        most = 0 if tables is None else tables.most
        self._places = torch.zeros(3, most, rows, dtype=torch.int32, device=device)
        self._last = torch.zeros(rows, dtype=torch.int32, device=device)
        self._table = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model whose inputs it reads."""
        return self._head.taps

    def room(self, tokens: int) -> Tensor:
        """[T, N * H] for the taps of a step, at a fixed address if a graph may have so many."""
        if tokens <= len(self._tapped):
            return self._tapped[:tokens]
        return self._tapped.new_empty(tokens, self._width)

    def begin(self, plan: StepPlan, staging: StepStaging) -> None:
        """Hears which pages came, and copies pages. It is rare, and no graph has it."""
        changed = plan.undrafted, plan.copy_source, plan.copy_target
        if not any(pages.size for pages in changed):
            return
        staging.begin()
        undrafted, source, target = (staging.add(pages) for pages in changed)
        staging.upload()
        if len(undrafted):
            self._pool.data[undrafted.long()] = 0  # Nothing of another sequence is read there.
        if len(source):
            self._pool.copy_pages(source.long(), target.long())

    def run(self, step: HeadStep) -> None:
        """Stores K and V of a step's tokens, and drafts."""
        shape, head = step.packed.shape, self._head
        drafts = shape.decodes > 0 and shape.width > 1 and self._tables is not None
        behind = self._behind(step, drafts=drafts)
        features = head.fc(step.tapped)
        x = self._entered(behind, features)
        inputs = step.inputs
        if not drafts:
            kept = self._products.linear(x, self._kept_rows, None)
            self._store(kept, self._rope, inputs.positions, inputs.stores, self._pool, 0, None)
            return
        heads = head.attention.qkv(x)
        to = inputs.positions, inputs.stores, self._pool, 0, None
        q, _, _ = self._store(heads, self._rope, *to)
        last = self._last[: shape.decodes]
        self._draft(step, q.index_select(0, last), features.index_select(0, last))

    def _draft(self, step: HeadStep, q: Tensor, residual: Tensor) -> None:
        """From q and what the layer adds to, of the newest token of each of B rows."""
        shape, head, tables = step.packed.shape, self._head, self._tables
        assert tables is not None
        rows = shape.decodes
        positions, stores, contexts = self._of_step(rows, shape.width)
        self._attention.prepare(
            PagedStep(
                rows, contexts[0], self._table[:rows], None, 0, all_fresh=False, differ=shape.differ
            )
        )
        ids = None
        for depth in range(shape.width - 1):
            if ids is not None:
                heads = head.attention.qkv(self._entered(ids, residual))
                to = positions[depth], stores[depth], self._pool, 0, None
                q, _, _ = self._store(heads, self._rope, *to)
            read = self._attention.attend_ends(0, q, contexts[depth], self._table[:rows])
            final = self._finished(residual, head.attention.output(read.flatten(1)))
            found = kernels.best_of_rows(self._products.linear(final, head.head_weight, None))[0]
            rest = len(head.head_weight), step.packed.slots, tables, depth
            ids = keep(found, head.drafted, *rest)

    def _finished(self, residual: Tensor, out: Tensor) -> Tensor:
        """The layer behind attention, and the last norm: [B, H]. `residual` becomes what the layer
        gives."""
        head = self._head
        norm, last = head.norm_of("post_attention_layernorm"), head.norm_of("norm")
        x = kernels.add_rms_norm(residual, out, norm.weight, norm.eps)
        added = feed_forward.run(head.feed_forward, x)
        assert isinstance(added, Tensor)
        return kernels.add_rms_norm(residual, added, last.weight, last.eps)

    def _entered(self, ids: Tensor, features: Tensor) -> Tensor:
        """[T, 2 H] of [T] ids and [T, H] features, which become what the layer adds to."""
        head = self._head
        token, feature = head.norm_of("input_layernorm"), head.norm_of("hidden_norm")
        gains, normed = (token.weight, feature.weight), head.config.norm_before_residual
        return enter(head.embed(ids), features, gains, token.eps, normed=normed)

    def _behind(self, step: HeadStep, *, drafts: bool) -> Tensor:
        """[T] int32, the token behind each; queues what rows need to draft."""
        packed, shape, inputs = step.packed, step.packed.shape, step.inputs
        behind, first = torch.empty_like(inputs.token_ids), shape.decode_tokens
        if drafts:
            assert self._tables is not None
            places = self._of_step(shape.decodes, shape.width)
            into = DraftRows(behind, self._last, *places, self._table)
            known = packed, inputs, self._tables, self._head.longest, self._page_size
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
