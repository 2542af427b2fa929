"""Beam search as transformers has it (`GenerationMixin._beam_search` of 5.24, not sampled).

Each step adds the log probability of a token to the score of its beam. Of all candidates the best
`BeamParams.kept` are looked at, best first:

- those that do not end go on, as many as there are beams;
- those that end become hypotheses if they are among the first `width`; their score is divided by
  the power of their length. The best `width` hypotheses are kept.

Scores are float32, as there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.beams.chooser import Candidates, Continuation, Hypothesis
from engine.beams.params import BeamParams, EarlyStopping
from engine.stopping import end_ids, end_reason
from engine.types import Request, SamplingParams, StopRules, TokenRecord


def with_candidates(request: Request, eos_ids: frozenset[int]) -> Request:
    """A request for a search, whose rows return the log probabilities that the search reads.
    Nothing is drawn, and no drafts are verified: which token follows is chosen after the step."""
    if request.beams is None:
        return request
    wanted = request.sampling.top_logprobs
    read = request.beams.read(len(end_ids(request.stop, eos_ids)), request.stop.min_tokens)
    return replace(
        request,
        sampling=SamplingParams(temperature=0.0, top_logprobs=max(read, wanted or 0)),
        beams=replace(request.beams, top_logprobs=wanted),
        speculates=False,
    )


class _Node(NamedTuple):
    """A token of the tree. Its path to the root is an output."""

    before: _Node | None
    record: TokenRecord


class _Beam(NamedTuple):
    score: np.float32
    """Sum of log probabilities."""
    last: _Node | None


class _Found(NamedTuple):
    score: np.float32
    """With the length penalty."""
    last: _Node


class BeamSearch:
    """The search of one request."""

    def __init__(self, params: BeamParams, stop: StopRules, eos_ids: frozenset[int]) -> None:
        self._params = params
        self._stop = stop
        self._eos_ids = eos_ids
        self._ends = np.array(sorted(end_ids(stop, eos_ids)), np.int32)
        self._beams = [_Beam(np.float32(0), None)]
        self._found: list[_Found] = []
        """Best first."""
        self._length = 0
        """Output tokens of each beam."""

    @property
    def awaits(self) -> int:
        """See `Chooser`."""
        return len(self._beams)

    @property
    def scores(self) -> NDArray[np.float32]:
        """See `Chooser`."""
        return np.array([beam.score for beam in self._beams], np.float32)

    def choose(self, candidates: list[Candidates]) -> list[Continuation]:
        """See `Chooser`."""
        counts = [len(one.ids) for one in candidates]
        parents = np.repeat(np.arange(len(counts)), counts)
        ids = np.concatenate([one.ids for one in candidates])
        scores = self.scores[parents]
        scores += np.concatenate([one.logprobs for one in candidates])
        ends = np.isin(ids, self._ends)
        if self._length < self._stop.min_tokens:
            scores[ends] = -np.inf
        best = np.argsort(-scores, kind="stable")[: self._params.kept(len(self._ends))]
        self._length += 1
        ends |= self._length >= self._stop.max_tokens
        chosen, going_on = [], list[_Beam]()
        for place, at in enumerate(best.tolist()):
            if scores[at] == -np.inf:
                break
            parent, is_candidate = int(parents[at]), place < self._params.width
            if ends[at] and not is_candidate:
                continue
            if not ends[at] and len(going_on) == self._params.width:
                continue
            node = _Node(self._beams[parent].last, self._record(candidates[parent], ids[at]))
            if ends[at]:
                self._found.append(_Found(self._penalised(scores[at], self._length), node))
            else:
                chosen.append(Continuation(parent, node.record.token_id))
                going_on.append(_Beam(scores[at], node))
        self._found.sort(key=lambda found: -found.score)
        del self._found[self._params.width :]
        self._beams = going_on
        return [] if self._is_over() else chosen

    def outputs(self) -> list[Hypothesis]:
        """See `Chooser`."""
        return [self._hypothesis(found) for found in self._found]

    def _is_over(self) -> bool:
        """Whether no better hypothesis is looked for."""
        params, best_length = self._params, self._length
        if not self._beams:
            return True
        if len(self._found) < params.width:
            return False
        if params.early_stopping is EarlyStopping.AT_ONCE:
            return True
        if params.early_stopping is EarlyStopping.NEVER_BETTER and params.length_penalty > 0:
            best_length = self._stop.max_tokens
        best = self._penalised(self._beams[0].score, best_length)
        return bool(best <= self._found[-1].score)

    def _penalised(self, score: np.float32, length: int) -> np.float32:
        return np.float32(score / np.float32(length**self._params.length_penalty))

    def _record(self, candidates: Candidates, token_id: np.int32) -> TokenRecord:
        """The record of a token, with the log probabilities that the client wants."""
        wanted = self._params.top_logprobs
        if wanted is None:
            return TokenRecord(int(token_id))
        at = int(np.flatnonzero(candidates.ids == token_id)[0])
        return TokenRecord(
            int(token_id),
            float(candidates.logprobs[at]),
            tuple(candidates.ids[:wanted].tolist()),
            tuple(candidates.logprobs[:wanted].tolist()),
        )

    def _hypothesis(self, found: _Found) -> Hypothesis:
        records = list[TokenRecord]()
        node: _Node | None = found.last
        while node is not None:
            records.append(node.record)
            node = node.before
        last = records[0].token_id
        reason = end_reason(last, len(records) - 1, self._stop, self._eos_ids)
        assert reason is not None, "a hypothesis ends"
        return Hypothesis(tuple(reversed(records)), float(found.score), reason)
