"""The part of a step that every rank runs, with PyTorch: all but the draw.

The token table holds the last token of every slot on the device, so a step can be launched before
the host has read the tokens of the one before.

Every step ends in a collective of each stage, and stages take from those before them. So when a
step has ended on rank 0, all ranks have stored its KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.grouped import GroupedAttention
from engine.eager.heads import Computed, HeadDrafter
from engine.groups.spec import State
from engine.hooks.steps import StepHooks
from engine.model import Decoder, Model
from engine.model.adapters.sites import AdapterSites
from engine.model.decoder import Tapped
from engine.pool.pools import KvPools
from engine.sampling import SampleResult
from engine.sampling.beams import BeamTables
from engine.speculation.tables import accepted
from engine.speculation.verifying import Verification, Verifier
from engine.step.attention import AttentionBatch, StepAttention
from engine.step.feedback import Feedback
from engine.step.plan import SCORE_ROWS, ScorePlan, StepPlan
from engine.types import SCRATCH_PAGE


class TorchSteps:
    """The model over the paged pool, and the token table. Belongs to the device's thread."""

    def __init__(
        self,
        model: Decoder,
        pools: KvPools,
        attention: StepAttention,
        max_slots: int,
        device: torch.device,
        hooks: StepHooks | None = None,
        verifier: Verifier | None = None,
        head: HeadDrafter | None = None,
        adapters: AdapterSites | None = None,
    ) -> None:
        """`head`: keeps KV of its own. It drafts if the verifier has it."""
        self._adapters = adapters
        self.model = model
        self._pools = pools
        self._attention = attention
        self._device = device
        self.hooks = hooks
        self._verifier = verifier
        self.verification: Verification | None = None
        """Verification of the step that runs, where drafts are verified."""
        self._head = head
        self._computed: Computed | None = None
        """The step that runs, for the head."""
        self._token_table = torch.zeros(max_slots + 1, dtype=torch.int64, device=device)
        """The last entry is nobody's."""
        shard, self._feedback = model.shard, None
        if shard.stages > 1 and shard.is_first:
            self._feedback = Feedback(shard.stages, max_slots)
        self._beams = BeamTables(max_slots, pools, self._write, device)

    def prepare(self, plan: StepPlan) -> StepPlan:
        """Begins a step: copies pages, and writes tokens that only the host knows. Returns the plan
        with lengths as the device knows them."""
        self.model.collective.begin_step()
        for pool, (source, target) in zip(self._pools, plan.copies, strict=True):
            if source.size:
                pool.copy_pages(self._upload(source), self._upload(target))
        self._computed, plan = None, self._followed(plan)
        if self._head is not None:
            self._head.begin(plan)
        if self._verifier is not None:
            self.verification = self._verifier.begin(plan)
            plan = self.verification.plan
        elif plan.write_slots.size:
            self._token_table[self._upload(plan.write_slots)] = self._upload(plan.write_tokens)
        if self._feedback is not None:
            self._take_tokens(self._feedback.due(plan))
        if self._adapters is not None:
            self._adapters.begin(plan.adapters_wanted, plan.adapters, plan.query_lens)
        if self.hooks is not None:
            self.hooks.narrow(plan)
            self.hooks.begin(plan)
        return plan

    def _take_tokens(self, due: Iterable[NDArray[np.int32]]) -> None:
        """Takes what the last stage has drawn, for these slots."""
        assert isinstance(self.model, Model), "our decoder has stages"
        for slots in due:
            tokens = torch.zeros(len(slots), dtype=torch.int64, device=self._device)
            self._token_table[self._upload(slots)] = self.model.stages.receive(tokens)

    def _followed(self, plan: StepPlan) -> StepPlan:
        """The plan with the pages of beams that the host does not know yet."""
        if not any(search.followed for search in plan.searches):
            return plan
        tables = [plan.page_table.copy(), *(other.pages.copy() for other in plan.others)]
        self._beams.follow(plan, [torch.from_numpy(table) for table in tables])
        pairs = zip(plan.others, tables[1:], strict=True)
        others = tuple(replace(other, pages=table) for other, table in pairs)
        return replace(plan, page_table=tables[0], others=others)

    def forward(self, plan: StepPlan) -> Tensor:
        """The forward pass, [T, H], of what `prepare` returned."""
        token_ids = self._upload(plan.token_ids)
        if plan.num_decodes and self._verifier is None:
            decoding = self._upload(plan.row_slots[: plan.num_decodes])
            token_ids[: plan.num_decodes] = self._token_table[decoding]
        batch, positions = self._attention_batch(plan), self._upload(plan.positions)
        self._attention.begin(batch)
        if self._head is None:
            hidden: Tensor = self.model(token_ids, positions, self._attention)
            return hidden
        assert isinstance(self.model, Model), "a head reads layers of our decoder"
        tapped = Tapped(self._head.taps, {})
        hidden = self.model(token_ids, positions, self._attention, tapped)
        decodes = plan.num_decodes
        if self.verification is not None:
            decodes = len(self.verification.columns.slots)
        self._computed = Computed(plan, batch, token_ids, tapped.states, decodes)
        return hidden

    def spoilt(self) -> Tensor | None:
        """After `forward`: the rows that have found a wrong state on some rank, [R]; None: there
        are no states."""
        own = self._attention.spoilt if isinstance(self._attention, GroupedAttention) else None
        if own is None or self.model.collective.size == 1:
            return own
        return self.model.collective.all_reduce(own.float()) > 0

    def scored(self, hidden: Tensor, wanted: ScorePlan) -> Iterator[tuple[Tensor, Tensor]]:
        """Logits of a prompt's positions and the ids that follow these, in chunks of rows: a long
        prompt's logits would not fit at once."""
        next_ids = self._upload(wanted.next_ids)
        for start in range(0, len(next_ids), SCORE_ROWS):
            ids = next_ids[start : start + SCORE_ROWS]
            first = wanted.first_token + start
            yield self.model.logits(hidden[first : first + len(ids)]), ids

    def logits(self, hidden: Tensor, plan: StepPlan) -> Tensor:
        """Logits of the sampled rows, as `Model.logits`."""
        return self.model.logits(hidden[self._upload(plan.sample_tokens)])

    def reads_logits(self, plan: StepPlan) -> bool:
        """Whether rank 0 samples from whole logits. Otherwise several ranks send their `best`."""
        return plan.whole_logits or self.model.collective.size == 1

    def best(self, hidden: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """The best tokens of the sampled rows, as `Model.best`."""
        return self.model.best(hidden[self._upload(plan.sample_tokens)])

    def judge(self, tokens: Tensor, finite: Tensor) -> SampleResult:
        """Keeps the tokens that count, of the best ones of all positions that a draw may read."""
        if self.verification is None:
            return SampleResult(tokens, finite)
        draws = self.verification.draws
        tokens = tokens[draws.places]
        counts = accepted(draws.ids, tokens, draws.valid)
        unread = torch.arange(tokens.shape[1], device=self._device) >= counts[:, None]
        return SampleResult(tokens, (finite[draws.places] | unread).all(1), counts=counts)

    def no_tokens(self, plan: StepPlan) -> SampleResult:
        """Room for what rank 0 draws."""
        assert plan.sample is not None, "the step samples"
        rows = torch.zeros(plan.sample.num_rows, dtype=torch.int64, device=self._device)
        if self.verification is None:
            return SampleResult(rows, rows.bool())
        tokens = torch.zeros_like(self.verification.draws.ids)
        return SampleResult(tokens, rows.bool(), counts=rows)

    def keep(self, plan: StepPlan, drawn: SampleResult) -> None:
        """Ends a step that samples: rank 0's tokens go into the tables of every rank."""
        if self.hooks is not None:
            self.hooks.end(self.model.collective)
        tokens, slots = drawn.tokens, self._upload(plan.sample_slots)
        if self._verifier is None or self.verification is None or drawn.counts is None:
            self.model.collective.broadcast(tokens)
            self._learn(tokens)
            self._token_table[slots] = tokens
            if self.model.shard.stages > 1:
                assert isinstance(self.model, Model), "our decoder has stages"
                self.model.stages.send(tokens)
            self._choose(plan, drawn)
            self.model.collective.end_step()
            return
        columns = torch.cat((tokens, drawn.counts[:, None]), dim=1)
        self.model.collective.broadcast(columns)
        tokens, counts = columns[:, :-1], columns[:, -1]
        self._learn(tokens, counts)
        self._verifier.end(self.verification, slots, tokens, counts)
        self._choose(plan, drawn)
        self.model.collective.end_step()

    def _choose(self, plan: StepPlan, drawn: SampleResult) -> None:
        """Chooses the beams of searches, on rank 0, and keeps them on every rank."""
        ids, logprobs = drawn.top_ids, drawn.top_logprobs
        for search in plan.searches:
            chosen = torch.zeros(2, len(search.slots), dtype=torch.int32, device=self._device)
            if ids is not None and logprobs is not None:
                first = (ids, logprobs) if ids.ndim == 2 else (ids[:, 0], logprobs[:, 0])
                chosen = self._beams.choose(search, *first)
            self.model.collective.broadcast(chosen)
            self._beams.keep(search, chosen)

    def _write(self, slots: Tensor, tokens: Tensor) -> None:
        """Puts tokens that the sampler has not drawn into the tables."""
        if self._verifier is None:
            self._token_table[slots] = tokens
        else:
            self._verifier.tables.write(slots, tokens)

    def next_drafts(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """After `keep`: the drafts of the slots that have drawn, [S, K], and how many, [S]."""
        assert self._verifier is not None, "drafts are verified here"
        tables, slots = self._verifier.tables, self._upload(plan.sample_slots)
        return tables.drafts[slots], tables.ready[slots]

    @property
    def draws(self) -> bool:
        """Whether this rank is of the stage that has logits."""
        return self.model.shard.is_last

    def end_without_tokens(self) -> None:
        """Ends a step that computes nothing."""
        if isinstance(self.model, Model):
            self.model.pass_on()
        self.end()

    def end(self) -> None:
        """Ends a step that samples nothing."""
        if self.hooks is not None:
            self.hooks.end(self.model.collective)
        self._learn(None)
        self.model.collective.barrier()
        self.model.collective.end_step()

    def _learn(self, tokens: Tensor | None, counts: Tensor | None = None) -> None:
        if self._head is not None and self._computed is not None:
            self._head.learn(self._computed, tokens, counts)

    def _attention_batch(self, plan: StepPlan) -> AttentionBatch:
        size = self._pools.first.page_size
        rows = np.repeat(np.arange(len(plan.row_slots)), plan.query_lens)
        page_index, offsets = np.divmod(plan.positions, size)
        pages = plan.page_table[rows, page_index]
        no_rows = np.zeros(0, np.intp)
        unstored = no_rows if self.verification is None else self.verification.unstored
        pages[unstored] = SCRATCH_PAGE
        batch = AttentionBatch(
            query_lens=plan.query_lens,
            context_lens=plan.context_lens,
            num_decodes=plan.num_decodes,
            page_table=self._upload(plan.page_table),
            token_pages=self._upload(pages),
            token_offsets=self._upload(offsets),
        )
        others = []
        for spec, other in zip(self._pools.specs[1:], plan.others, strict=True):
            own = replace(batch, page_table=self._upload(other.pages))
            if isinstance(spec.kind, State):
                others.append(replace(own, is_state=True))
                continue
            pages = other.pages[rows, page_index - other.skipped[rows]]
            pages[unstored] = SCRATCH_PAGE
            contexts = plan.context_lens - other.skipped * np.int32(size)
            others.append(replace(own, context_lens=contexts, token_pages=self._upload(pages)))
        return replace(batch, others=tuple(others)) if others else batch

    def _upload(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device, non_blocking=True)
