"""What attempts in the batch draw, on its way to the routers: one message a step and router."""

from __future__ import annotations

import logging
from collections import defaultdict

from baton.worker.v1 import worker_pb2
from baton.worker_attempts import Attempts
from baton.worker_outbox import Outbox
from baton.worker_wire import tokens_message
from decode_service import spans
from decode_service.attempt import DecodeAttempt
from decode_service.messages import finished_message, first_token_message
from engine.types import ChoiceEnded, NewTokens
from telemetry import failpoints
from telemetry.metrics import WorkerMetrics

logger = logging.getLogger(__name__)


class TokenStream:
    """Counts tokens and passes them on. It ends no attempt: that is the service's to do."""

    def __init__(self, attempts: Attempts[DecodeAttempt], metrics: WorkerMetrics) -> None:
        self._attempts = attempts
        self._metrics = metrics

    def new_tokens(self, tokens: NewTokens) -> set[DecodeAttempt]:
        """The tokens of a step: counted, and on to the routers that want them. Returns attempts of
        which a token was lost, to a bug: they cannot go on, and the others do."""
        wanted: dict[Outbox, list[int]] = defaultdict(list)
        broken: set[DecodeAttempt] = set()
        rows = zip(tokens.request_ids, tokens.choices.tolist(), strict=True)
        for row, (attempt_id, choice) in enumerate(rows):
            attempt = self._attempts.get(attempt_id)
            if attempt is None:
                continue
            try:
                failpoints.hit("decode.tokens", len(attempt.request.prompt_ids))
                if attempt.is_whole and not attempt.computed_ns:
                    _first_tokens(attempt, tokens, row)
                attempt.count(choice, tokens.at_ns)
            except Exception:
                logger.exception("a token broke its handler")
                broken.add(attempt)
                continue
            if not attempt.silent:
                wanted[attempt.stream].append(row)
        for stream, of_stream in wanted.items():
            message = tokens_message(tokens, of_stream)
            stream.send(worker_pb2.WorkResponse(tokens=message))
        return broken

    def choice_ended(self, attempt: DecodeAttempt, event: ChoiceEnded) -> None:
        """Tells of a choice's end; with the last one's, of all that is to be told at the end."""
        attempt.preemptions += event.preemptions
        if event.last:
            failpoints.hit("decode.ended")
        attempt.tell(finished=finished_message(attempt, event))
        if event.last:
            spans.write_generate(attempt)
            if attempt.second_token_gap_ms is not None:
                self._metrics.second_token(attempt.second_token_gap_ms / 1e3)


def _first_tokens(attempt: DecodeAttempt, tokens: NewTokens, row: int) -> None:
    """The prompt of an attempt is computed here. All choices begin in the same step, but for
    those that were resumed or preempted, whose first tokens are told like all others."""
    rows = range(row, min(row + attempt.request.choices, len(tokens.request_ids)))
    firsts = [i for i in rows if tokens.request_ids[i] == attempt.id and tokens.indices[i] == 0]
    if len(firsts) == attempt.request.choices:
        first = first_token_message(attempt, [tokens.record(i) for i in firsts])
        attempt.tell(first_token=first)
    attempt.computed_ns = attempt.ready_ns = attempt.first_token_ns = tokens.at_ns
    spans.write_prompt(attempt)
