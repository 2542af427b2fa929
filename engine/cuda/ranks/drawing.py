"""The end of a step on a GPU: tokens are drawn, put into the token table, and read by the host.

One of several ranks has a part of each row of logits.

- Greedy rows: each rank sends all others the best token of its part. So all know the same tokens,
  and nobody has to send them.
- Other rows: rank 0 gathers whole rows, draws, and sends the tokens.
- A step that draws nothing ends in a barrier.

So when a step has ended on one rank, all ranks have stored its KV: each of these waits for what
every rank does behind its stores. (Rank 0 has the last part of every row before it draws. Another
rank has rank 0's tokens, or the others' best ones.)
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.beams.plan import SearchPlan
from engine.cuda.ranks.collective import CudaCollective
from engine.cuda.ranks.vocabulary import (
    Kept,
    Vocabulary,
    VocabularyPart,
    vocabulary_of_model,
)
from engine.cuda.steps.staging import Int32s
from engine.cuda.waiting import Read
from engine.hooks.calling import Failures
from engine.model import Decoder
from engine.sampling import Sampler, SampleResult, Scores, score
from engine.sampling.beams import BeamTables
from engine.sampling.pooling import pooled_states
from engine.step.collective import Collective
from engine.step.plan import SCORE_ROWS, ScorePlan, ScoreResult, StepPlan, StepResult
from engine.step.sampling import Masks, SamplePlan

Logits = Callable[[Tensor], Tensor]
"""[S, H] -> [S, vocab], or a rank's part of it."""


class Verified(NamedTuple):
    """The B decode rows of a step that verifies drafts, without padding."""

    width: int
    """W"""
    ids: Tensor
    """int32: first W of each row, its last token and its drafts."""
    kept: Tensor
    """[B] int32, the first position of each row that is not kept."""
    returns_drafts: bool = False
    """Whether the host wants to know the next drafts."""


class Draw(NamedTuple):
    """The draw of a step whose logits are computed, or will be."""

    logits: Tensor
    """[S, vocab], or a rank's part of it; where drafts are verified, W rows of each decode row."""
    slots: Tensor
    """[S]"""
    plan: SamplePlan | None
    reads_whole: bool
    """Whether several ranks gather whole rows (`StepPlan.whole_logits`)."""
    scores: list[HostScores]
    failures: Failures | None = None
    """Returns which hooks have failed, once the data is there."""
    verified: Verified | None = None
    """None: no step verifies drafts."""
    pooled: Tensor | None = None
    """[P, H]. Pooled states on their way to pinned memory; None: the step pools nothing."""
    then: Callable[[], None] = lambda: None
    """Called once the tokens are in the tables, or there are none."""
    spoilt: Tensor | None = None
    """[R] int32 on its way to pinned memory: 1 for rows that have found a wrong state. None: there
    are no states."""
    searches: tuple[SearchPlan, ...] = ()


class Drawing(Protocol):
    """Draws a rank's steps, on the executor's stream."""

    vocab_size: int

    def warm(self, logits: Tensor, slots: Tensor, verified: Verified) -> None:
        """Runs what ends a greedy step of decode rows; `logits` has `verified.width` rows of
        each."""
        ...

    def draw(self, draw: Draw, masks: Masks | None = None) -> Read:
        """Draws a step's tokens, puts them into the token table and queues their copy to the
        host."""
        ...

    def score(self, hidden: Tensor, wanted: ScorePlan, logits_of: Logits) -> HostScores:
        """Scores a prompt in chunks of rows, since a long prompt's logits would not fit at once."""
        ...


def drawing_of(
    model: Decoder, sampler: Sampler | None, token_table: Tensor, beams: BeamTables
) -> Drawing:
    """The drawing of a rank. Only the first has a sampler."""
    vocabulary = vocabulary_of_model(model)
    if sampler is not None:
        return LeaderSampling(sampler, token_table, beams, vocabulary)
    return FollowerSampling(token_table, beams, vocabulary, model.config.vocab_size)


class LeaderSampling:
    """Draws the tokens for all ranks, on the first of them, which may be the only one."""

    def __init__(
        self, sampler: Sampler, token_table: Tensor, beams: BeamTables, vocabulary: Vocabulary
    ) -> None:
        self._sampler = sampler
        self._token_table = token_table
        self._beams = beams
        self._vocabulary = vocabulary
        self.vocab_size = sampler.vocab_size

    def warm(self, logits: Tensor, slots: Tensor, verified: Verified) -> None:
        """See `Drawing`."""
        self._vocabulary.best(logits, Kept(slots, self._token_table))

    def draw(self, draw: Draw, masks: Masks | None = None) -> Read:
        """See `Drawing`. It reports how long several ranks have waited for each other, too."""
        read = with_failures(self._drawn(draw, masks), draw.failures)
        ranks = self._vocabulary.ranks if isinstance(self._vocabulary, VocabularyPart) else None
        if ranks is None or (waits := ranks.waits()) is None:
            return read
        waited = to_pinned(waits)

        def read_waits() -> StepResult:
            ranks.take_waits(waited)
            return read()

        return read_waits

    def _drawn(self, draw: Draw, masks: Masks | None) -> Read:
        plan, scores = draw.plan, draw.scores
        if plan is None:
            self._vocabulary.end_without()
            draw.then()
            return lambda: nothing_drawn(scores)
        if not draw.reads_whole:
            kept = Kept(draw.slots, self._token_table)
            drawn = to_pinned(self._vocabulary.best(draw.logits, kept))
            draw.then()
            return lambda: _read_greedy(drawn, scores)
        logits = self._vocabulary.whole(draw.logits).float()
        result = self._sampler.sample(logits, plan, masks)
        self._token_table[draw.slots.long()] = self._vocabulary.share(result.tokens.int())
        self._choose(draw.searches, result.top_ids, result.top_logprobs)
        draw.then()
        host = result._replace(
            **{name: to_pinned(t) for name, t in result._asdict().items() if t is not None}
        )
        return lambda: _read_sampled(host, scores)

    def score(self, hidden: Tensor, wanted: ScorePlan, logits_of: Logits) -> HostScores:
        """See `Drawing`."""
        next_ids = torch.from_numpy(wanted.next_ids).to(hidden.device, torch.int64)
        parts = []
        for start in range(0, len(next_ids), SCORE_ROWS):
            ids = next_ids[start : start + SCORE_ROWS]
            first = wanted.first_token + start
            logits = self._vocabulary.whole(logits_of(hidden[first : first + len(ids)])).float()
            parts.append(score(logits, ids, wanted.top_n))
        columns = (torch.cat(column) for column in zip(*parts, strict=True))
        return HostScores(wanted.next_ids, Scores(*map(to_pinned, columns)))

    def _choose(
        self, searches: tuple[SearchPlan, ...], ids: Tensor | None, logprobs: Tensor | None
    ) -> None:
        """Chooses the beams of searches by [S, K] candidates of the draws."""
        for search in searches:
            assert ids is not None, "rows of beams have candidates"
            assert logprobs is not None, "rows of beams have candidates"
            chosen = self._vocabulary.share(self._beams.choose(search, ids, logprobs))
            self._beams.keep(search, chosen)


class FollowerSampling:
    """Follows the drawing on the other ranks: the same collectives in the same order. The host
    reads nothing."""

    def __init__(
        self, token_table: Tensor, beams: BeamTables, vocabulary: Vocabulary, vocab_size: int
    ) -> None:
        self._token_table = token_table
        self._beams = beams
        self._vocabulary = vocabulary
        self.vocab_size = vocab_size

    def warm(self, logits: Tensor, slots: Tensor, verified: Verified) -> None:
        """See `Drawing`."""
        self._vocabulary.best(logits, Kept(slots, self._token_table))

    def draw(self, draw: Draw, masks: Masks | None = None) -> Read:
        """See `Drawing`."""
        if draw.plan is None:
            self._vocabulary.end_without()
        elif not draw.reads_whole:
            self._best(draw)
        else:
            self._vocabulary.whole(draw.logits)
            self._told(draw)
            for search in draw.searches:
                chosen = draw.slots.new_empty(2, len(search.slots))
                self._beams.keep(search, self._vocabulary.share(chosen))
        draw.then()
        return with_failures(nothing_drawn, draw.failures)  # They are logged where they happened.

    def _best(self, draw: Draw) -> None:
        """Finds the tokens of greedy rows, as all ranks do."""
        self._vocabulary.best(draw.logits, Kept(draw.slots, self._token_table))

    def _told(self, draw: Draw) -> None:
        """Takes the tokens that rank 0 has drawn."""
        tokens = self._vocabulary.share(torch.empty_like(draw.slots))
        self._token_table[draw.slots.long()] = tokens

    def score(self, hidden: Tensor, wanted: ScorePlan, logits_of: Logits) -> HostScores:
        """See `Drawing`. Rank 0 has the logits."""
        for start in range(0, len(wanted.next_ids), SCORE_ROWS):
            rows = min(SCORE_ROWS, len(wanted.next_ids) - start)
            first = wanted.first_token + start
            self._vocabulary.whole(logits_of(hidden[first : first + rows]))
        nothing = torch.empty(0)
        return HostScores(wanted.next_ids, Scores(nothing, nothing, nothing))


# -- what the host reads ------------------------------------------------------------------------


class HostScores(NamedTuple):
    """Log probabilities that are being copied into pinned memory."""

    token_ids: Int32s
    scores: Scores

    def read(self) -> ScoreResult:
        """Once they are there."""
        logprob, top_ids, top_logprobs = (column.numpy() for column in self.scores)
        return ScoreResult(self.token_ids, logprob, top_ids.astype(np.int32), top_logprobs)


def to_pinned(tensor: Tensor) -> Tensor:
    """Queues a copy. The allocator does not reuse the memory before the copy is made."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def with_failures(read: Read, failures: Failures | None) -> Read:
    """Reads which hooks have failed, too."""
    if failures is None:
        return read
    return lambda: replace(read(), hook_failures=failures())


def pooled_of(plan: StepPlan, hidden: Tensor | None, decode_tokens: int | None) -> Tensor | None:
    """Pools states and queues their copy to the host. None: the step pools nothing.

    Args:
        plan: the step.
        hidden: [R, H] of all tokens of decode rows, with those of padding, and of the last token of
            each prompt; or [T, H] of all tokens.
        decode_tokens: number of decode rows' tokens, with padding; None: `hidden` has all tokens.
    """
    if not len(plan.pools):
        return None
    assert hidden is not None, "a step that pools has prompts"
    if decode_tokens is None:
        return to_pinned(pooled_states(plan, hidden))
    return to_pinned(pooled_states(plan, hidden[decode_tokens - plan.num_decodes :], by_row=True))


def spoilt_of(
    plan: StepPlan, spoilt: Tensor | None, decodes: int, ranks: Collective
) -> Tensor | None:
    """Queues the copy to the host of where any rank has found a wrong state, by row of the plan.
    None: there are no states.

    Args:
        plan: the step.
        spoilt: int32 of each row on this rank: decode rows, with those of padding, then prompts.
        decodes: number of decode rows, with those of padding.
        ranks: all ranks. Each calls it.
    """
    if spoilt is None:
        return None
    if ranks.size > 1:
        assert isinstance(ranks, CudaCollective)
        spoilt = ranks.gather_on_all(spoilt).amax(0)
    real = plan.num_decodes
    prompts = spoilt[decodes:][: len(plan.row_slots) - real]
    return to_pinned(torch.cat((spoilt[:real], prompts)))


def with_rest(read: Read, draw: Draw) -> Read:
    """Reads what was pooled, and which rows are spoilt, too."""
    return _with_spoilt(_pooling(read, draw.pooled), draw.spoilt)


def _pooling(read: Read, pooled: Tensor | None) -> Read:
    if pooled is None:
        return read
    return lambda: replace(read(), pooled=pooled.numpy())


def _with_spoilt(read: Read, spoilt: Tensor | None) -> Read:
    if spoilt is None:
        return read
    return lambda: replace(read(), spoilt=spoilt.numpy() > 0)


def nothing_drawn(scores: list[HostScores] | None = None) -> StepResult:
    """The result of a step that drew nothing."""
    read = tuple(entry.read() for entry in scores or ())
    return StepResult(np.zeros(0, np.int32), np.zeros(0, np.bool_), None, None, None, read)


def _read_greedy(drawn: Tensor, scores: list[HostScores]) -> StepResult:
    tokens, finite = drawn.numpy()
    read = tuple(entry.read() for entry in scores)
    return StepResult(tokens, finite.astype(np.bool_), None, None, None, read)


def _read_sampled(drawn: SampleResult, scores: list[HostScores]) -> StepResult:
    return StepResult(
        tokens=drawn.tokens.numpy().astype(np.int32),
        finite=drawn.finite.numpy(),
        logprobs=None if drawn.logprob is None else drawn.logprob.numpy(),
        top_ids=None if drawn.top_ids is None else drawn.top_ids.numpy().astype(np.int32),
        top_logprobs=None if drawn.top_logprobs is None else drawn.top_logprobs.numpy(),
        scores=tuple(entry.read() for entry in scores),
    )
