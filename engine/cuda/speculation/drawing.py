"""The end of a step that verifies drafts: tokens are drawn, drafts accepted and the next ones made,
before the host has read anything."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.cuda.ranks.drawing import (
    Draw,
    Drawing,
    FollowerSampling,
    HostScores,
    LeaderSampling,
    Verified,
    nothing_drawn,
    to_pinned,
)
from engine.cuda.ranks.vocabulary import Vocabulary, vocabulary_of_model
from engine.cuda.speculation.accepting import accept, read_result
from engine.cuda.speculation.noise import uniform
from engine.cuda.speculation.suffix import draft_suffix
from engine.cuda.waiting import Read
from engine.model import Decoder
from engine.pool.pools import KvPools
from engine.pool.state_pool import StatePool
from engine.sampling import Sampler, SampleResult
from engine.sampling.beams import BeamTables
from engine.speculation.drafter import Drafter
from engine.speculation.suffix import SuffixDrafter
from engine.speculation.tables import SlotTables
from engine.speculation.verifying import Draws
from engine.step.plan import StepResult
from engine.step.sampling import Masks, SamplePlan


class Drafting(NamedTuple):
    """What verifies and makes drafts on a GPU."""

    tables: SlotTables
    drafter: Drafter | None
    """None: a draft head, which goes on by itself (`engine.cuda.speculation.heads`)."""
    synthetic: float | None = None
    """Accepts drafts with this probability, whatever was drawn: `debug.synthetic_acceptance`."""

    def draft(self, slots: Tensor) -> None:
        """Makes the next drafts of the sequences in these slots, [S] int32."""
        if isinstance(self.drafter, SuffixDrafter):
            draft_suffix(slots, self.tables, always=self.synthetic is not None)
            return
        if self.drafter is not None:
            found = self.drafter.draft(self.tables, slots.long())
            self.tables.set_drafts(slots.long(), *found)

    def end(
        self, drawn: Tensor, slots: Tensor, verified: Verified, counts: Tensor | None
    ) -> Tensor:
        """Accepts drafts and makes the next ones: the result of a step, see `accept`. All ranks do
        so, with equal numbers.

        Args:
            drawn: [2, L], tokens, and whether their logits are finite.
            slots: [S] int32, of all draws.
            verified: the decode rows.
            counts: [S] int32, the most of each that may count; None: all.
        """
        result = accept(
            verified.ids,
            drawn,
            slots,
            verified.kept,
            verified.width,
            self.tables,
            allowed=None if self.synthetic is not None else counts,
            synthetic=self.synthetic,
        )
        self.draft(slots)
        return result

    def warm(
        self, vocabulary: Vocabulary, logits: Tensor, slots: Tensor, verified: Verified
    ) -> None:
        """Runs what ends a step, greedy or drawn."""
        drawn = vocabulary.best(logits)
        self.end(drawn, slots, verified, None)
        self.end(drawn, slots, verified, torch.ones_like(slots))


class _Host(NamedTuple):
    """What is being copied into pinned memory."""

    result: Tensor
    sampled: SampleResult | None
    next_drafts: Tensor | None
    next_ready: Tensor | None
    scores: list[HostScores]

    def read(self) -> StepResult:
        """Once it is there."""
        found = read_result(self.result)
        width = found.tokens.shape[1]
        tokens = found.tokens.numpy()
        drafts, ready = self.next_drafts, self.next_ready
        result = StepResult(
            tokens=tokens[:, 0] if width == 1 else tokens,
            finite=found.finite.numpy().astype(np.bool_),
            logprobs=None,
            top_ids=None,
            top_logprobs=None,
            scores=tuple(entry.read() for entry in self.scores),
            counts=found.counts.numpy(),
            drafted=found.drafted.numpy(),
            next_drafts=None if drafts is None else drafts.numpy(),
            next_ready=None if ready is None else ready.numpy(),
        )
        if self.sampled is None or self.sampled.logprob is None:
            return result
        names = ("logprob", "top_ids", "top_logprobs")
        columns = (getattr(self.sampled, name) for name in names)
        logprobs, top_ids, top_logprobs = (
            None if column is None else (column[:, 0] if width == 1 else column).numpy()
            for column in columns
        )
        return replace(
            result,
            logprobs=logprobs,
            top_ids=None if top_ids is None else top_ids.astype(np.int32),
            top_logprobs=top_logprobs,
        )


class DraftSampling(LeaderSampling):
    """Drawing with drafts. Tokens go into the tables by slot, which have the token table."""

    def __init__(
        self, sampler: Sampler, drafting: Drafting, beams: BeamTables, vocabulary: Vocabulary
    ) -> None:
        super().__init__(sampler, drafting.tables.next, beams, vocabulary)
        self._drafting = drafting
        sampler.noise = uniform

    def warm(self, logits: Tensor, slots: Tensor, verified: Verified) -> None:
        """See `Drawing`."""
        self._drafting.warm(self._vocabulary, logits, slots, verified)
        self._sampler.noise(slots.long(), slots.long(), slots.long())

    def _drawn(self, draw: Draw, masks: Masks | None) -> Read:
        plan, verified, scores, drafting = draw.plan, draw.verified, draw.scores, self._drafting
        if plan is None:
            self._vocabulary.end_without()
            draw.then()
            return lambda: nothing_drawn(scores)
        assert verified is not None, "the executor verifies every step"
        sampled = None
        if not draw.reads_whole:
            result = drafting.end(self._vocabulary.best(draw.logits), draw.slots, verified, None)
        else:
            sampled = self._sample(draw, plan, verified, masks)
            assert sampled.counts is not None
            drawn = _columns(sampled.tokens, sampled.finite, verified)
            told = torch.cat((drawn.flatten(), sampled.counts.int()))
            result = drafting.end(*_parts(self._vocabulary.share(told), draw, verified))
            if sampled.top_ids is not None and sampled.top_logprobs is not None:
                first = sampled.top_ids[:, 0], sampled.top_logprobs[:, 0]
                self._choose(draw.searches, *first)
            names = ("logprob", "top_ids", "top_logprobs")
            kept = {name: getattr(sampled, name) for name in names}
            pinned = {name: None if t is None else to_pinned(t) for name, t in kept.items()}
            sampled = SampleResult(result, result, **pinned)
        pinned_result = to_pinned(result)
        draw.then()
        drafts = ready = None
        if verified.returns_drafts:
            tables, slots = drafting.tables, draw.slots.long()
            drafts, ready = to_pinned(tables.drafts[slots]), to_pinned(tables.ready[slots])
        return _Host(pinned_result, sampled, drafts, ready, scores).read

    def _sample(
        self, draw: Draw, plan: SamplePlan, verified: Verified, masks: Masks | None
    ) -> SampleResult:
        """Draws by the sampler, column after column."""
        logits = self._vocabulary.whole(draw.logits)
        tables, width, device = self._drafting.tables, verified.width, logits.device
        decodes, draws = len(verified.kept), len(draw.slots)
        slots = draw.slots.long()
        lengths = tables.length[slots]
        places = torch.arange(decodes * width, device=device).view(decodes, width)
        first = decodes * width + torch.arange(draws - decodes, device=device)
        ids = torch.zeros(draws, width, dtype=torch.int64, device=device)
        ids[:decodes] = verified.ids[: decodes * width].view(decodes, width)
        valid = torch.ones(draws, dtype=torch.int64, device=device)
        ready = (1 + tables.ready[slots[:decodes]]).clamp(max=width)
        valid[:decodes] = ready.minimum(verified.kept - lengths[:decodes]).clamp(min=0)
        indices = lengths - tables.prompt_len[slots]
        indices[:decodes] += 1
        given = Draws(
            torch.cat((places, first[:, None].expand(-1, width))), ids, valid, indices.long()
        )
        return self._sampler.verify(logits.float(), plan, given, masks)


class FollowerDraftSampling(FollowerSampling):
    """Follows the drawing with drafts on the other ranks: the same tables, drafts and
    collectives."""

    def __init__(
        self, drafting: Drafting, beams: BeamTables, vocabulary: Vocabulary, vocab_size: int
    ) -> None:
        super().__init__(drafting.tables.next, beams, vocabulary, vocab_size)
        self._drafting = drafting

    def warm(self, logits: Tensor, slots: Tensor, verified: Verified) -> None:
        """See `Drawing`."""
        self._drafting.warm(self._vocabulary, logits, slots, verified)

    def _best(self, draw: Draw) -> None:
        assert draw.verified is not None, "the executor verifies every step"
        self._drafting.end(self._vocabulary.best(draw.logits), draw.slots, draw.verified, None)

    def _told(self, draw: Draw) -> None:
        assert draw.verified is not None, "the executor verifies every step"
        decodes, draws = len(draw.verified.kept), len(draw.slots)
        length = decodes * draw.verified.width + draws - decodes
        told = draw.slots.new_empty(2 * length + draws)
        self._drafting.end(*_parts(self._vocabulary.share(told), draw, draw.verified))


def draft_sampling(
    model: Decoder, sampler: Sampler | None, drafting: Drafting, beams: BeamTables
) -> Drawing:
    """The drawing of a rank that verifies drafts. Only the first has a sampler."""
    vocabulary = vocabulary_of_model(model)
    if sampler is not None:
        return DraftSampling(sampler, drafting, beams, vocabulary)
    return FollowerDraftSampling(drafting, beams, vocabulary, model.config.vocab_size)


def _parts(told: Tensor, draw: Draw, verified: Verified) -> tuple[Tensor, Tensor, Verified, Tensor]:
    """What `Drafting.end` takes, from all that rank 0 has told: [2 * L + S] int32, tokens, whether
    they are finite, and counts."""
    draws = len(draw.slots)
    return told[:-draws].view(2, -1), draw.slots, verified, told[-draws:]


def _columns(tokens: Tensor, finite: Tensor, verified: Verified) -> Tensor:
    """[2, L] int32: of [S, W] tokens those that were drawn, and whether [S] rows are finite."""
    decodes, width = len(verified.kept), verified.width
    every = torch.cat((tokens[:decodes].reshape(-1), tokens[decodes:, 0]))
    usable = torch.cat((finite[:decodes].repeat_interleave(width), finite[decodes:]))
    return torch.stack((every.int(), usable.int()))


def widths_of(drafting: Drafting | None, pools: KvPools) -> tuple[int, ...]:
    """Tokens of decode rows for which there are graphs. A draft cannot be taken back from a
    state."""
    if drafting is None or any(isinstance(pool, StatePool) for pool in pools):
        return (1,)
    return tuple(sorted({1, 2, drafting.tables.most + 1}))
