"""Puts the tokens of one choice in order, whichever worker was faster.

The prefill worker sends token 0 over its stream. The decode worker may repeat it over its own and
goes on from there. A later attempt may repeat more.

Life of a choice: OPEN -> its end is known -> every token before that end has come -> ENDED. If the
front door ends it, it is ENDED at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from router.jobs import ChoiceEnded, JobEvent, JobTokens, TokenScore

if TYPE_CHECKING:
    from baton.worker.v1 import worker_pb2


class ChoiceMerger:
    """Merges runs of tokens by index.

    Invariant: tokens [0, len(token_ids)) were returned once each, in order. Every waiting run
    begins after them.
    """

    def __init__(self, choice: int) -> None:
        self.choice = choice
        self.token_ids: list[int] = []
        """Tokens returned so far. A resumed attempt would be forced to repeat them."""
        self.ended = False
        self._waiting: list[JobTokens] = []
        self._end: ChoiceEnded | None = None

    def goes_on_with(self, run: JobTokens) -> bool:
        """Takes a run that follows what was returned where nothing waits, not even the end; says
        whether it is one. Then it is the event that follows."""
        if self.ended or self._waiting or self._end or run.first_index != len(self.token_ids):
            return False
        self.token_ids += run.token_ids
        return True

    def add(self, run: JobTokens) -> list[JobEvent]:
        """Takes a run in any order; returns the events that follow: tokens, the end, or nothing."""
        if self.ended:
            return []
        self._waiting.append(run)
        return [*self._take_contiguous(), *self._take_end()]

    def end(self, end: ChoiceEnded) -> list[JobEvent]:
        """Takes the end, which may come before tokens. Returns it once all tokens have come."""
        if not self.ended:
            self._end = end
        return self._take_end()

    def close(self) -> None:
        """The choice needs no more tokens."""
        self.ended = True
        self._waiting.clear()

    def forget_waiting(self) -> None:
        """Drops tokens that came out of order, since their attempt is over."""
        self._waiting.clear()
        self._end = None

    def _take_contiguous(self) -> Iterable[JobEvent]:
        self._waiting.sort(key=lambda run: run.first_index)
        while self._waiting and self._waiting[0].first_index <= len(self.token_ids):
            run = self._waiting.pop(0)
            fresh = _without_first(run, len(self.token_ids) - run.first_index)
            if fresh.token_ids:
                self.token_ids += fresh.token_ids
                yield fresh

    def _take_end(self) -> list[JobEvent]:
        end = self._end
        if self.ended or end is None or len(self.token_ids) < end.output_tokens:
            return []
        self.close()
        return [end]


def first_tokens(
    message: worker_pb2.FirstToken, choices: Sequence[int], first_indexes: Sequence[int]
) -> list[JobTokens]:
    """The first new token of every choice of an attempt.

    Args:
        message: one record for each choice.
        choices: the index of each choice in the job.
        first_indexes: index of the new token in each choice's whole output.
    """
    return [
        JobTokens(choice, first_index, (record.token_id,), _logprobs([record]))
        for choice, first_index, record in zip(
            choices, first_indexes, message.records, strict=False
        )
    ]


def step_tokens(message: worker_pb2.Tokens) -> Iterable[tuple[bytes, JobTokens]]:
    """The tokens of a step, with the attempt of each. Neighbours that continue each other are one
    run: several tokens of one step cost a client's stream one message."""
    scored: dict[int, TokenScore] = {}
    if scored_rows := message.scored_rows:
        scored = dict(zip(unpack_ids(scored_rows), _logprobs(message.records), strict=True))
    choices = unpack_ids(message.choice_indices)
    indices, ids = unpack_ids(message.indices), unpack_ids(message.token_ids)
    attempts = list(message.attempt_ids)
    start, rows = 0, len(ids)
    for end in range(1, rows + 1):
        if (
            end < rows
            and indices[end] == indices[end - 1] + 1
            and choices[end] == choices[start]
            and attempts[end] == attempts[start]
            and (end in scored) == (start in scored)
        ):
            continue
        logprobs: tuple[TokenScore, ...] = ()
        if scored:
            logprobs = tuple(scored[row] for row in range(start, end) if row in scored)
        yield attempts[start], JobTokens(choices[start], indices[start], ids[start:end], logprobs)
        start = end


def prompt_logprobs(message: worker_pb2.PromptLogprobs) -> tuple[TokenScore, ...]:
    """Log probabilities of the prompt's tokens from the second on."""
    return _logprobs(message.records)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Token or page ids from packed little-endian uint32."""
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def _without_first(run: JobTokens, count: int) -> JobTokens:
    if count == 0:
        return run
    return JobTokens(
        run.choice, run.first_index + count, run.token_ids[count:], run.logprobs[count:]
    )


def _logprobs(records: Sequence[worker_pb2.TokenRecord]) -> tuple[TokenScore, ...]:
    return tuple(
        TokenScore(
            record.logprob,
            unpack_ids(record.top_ids),
            struct.unpack(f"<{len(record.top_logprobs) // 4}f", record.top_logprobs),
        )
        for record in records
        if record.HasField("logprob")
    )
