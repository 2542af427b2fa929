"""The way of tokens from a step to the routers: one message for each step and router."""

from __future__ import annotations

import logging
from collections import defaultdict

from baton.worker.v1 import worker_pb2
from decode_service.leg import DecodeLeg, DecodeState
from engine.types import NewTokens, SequenceEnded
from faults import failpoints
from telemetry.metrics.worker import WorkerMetrics
from worker_base.legs import LegTable
from worker_base.messages import tokens_message
from worker_base.outbox import Outbox

logger = logging.getLogger(__name__)


class TokenStream:
    """Counts tokens and passes them on. Only the service ends legs."""

    def __init__(self, legs: LegTable[DecodeLeg], metrics: WorkerMetrics) -> None:
        self._legs = legs
        self._metrics = metrics

    def new_tokens(self, tokens: NewTokens) -> set[DecodeLeg]:
        """Counts the tokens of a step and sends them to the routers that want them.

        Returns:
            Legs that lost a token to a bug. They cannot go on; the others do.
        """
        wanted: dict[Outbox, list[int]] = defaultdict(list)
        broken: set[DecodeLeg] = set()
        rows = zip(tokens.request_ids, tokens.choices.tolist(), strict=True)
        for row, (leg_id, choice) in enumerate(rows):
            leg = self._legs.get(leg_id)
            if leg is None or leg.state is DecodeState.QUARANTINED:
                continue  # It was given up when its pages landed, and the engine knows of both.
            try:
                failpoints.hit("decode.tokens", len(leg.request.prompt_ids))
                if leg.is_whole and not leg.computed_ns:
                    _prompt_computed(leg, tokens, row)
                leg.count(choice, tokens.at_ns, tokens.step_ns)
            except Exception:
                logger.exception("a token broke its handler")
                broken.add(leg)
                continue
            if not leg.silent:
                wanted[leg.stream].append(row)
        for stream, rows_of_stream in wanted.items():
            message = tokens_message(tokens, rows_of_stream)
            stream.send(worker_pb2.WorkResponse(tokens=message))
        return broken

    def choice_ended(self, leg: DecodeLeg, event: SequenceEnded) -> None:
        """Reports to the router that a choice ended. The last one ends the counting, too."""
        leg.preemptions += event.preemptions
        if event.last:
            failpoints.hit("decode.ended")
        leg.send_end(event)
        searched = leg.request.beams is not None  # All its tokens come together.
        if event.last and not searched and leg.second_token_gap_ms is not None:
            self._metrics.second_token(leg.second_token_gap_ms / 1e3, leg.gap_parts_ms)


def _prompt_computed(leg: DecodeLeg, tokens: NewTokens, row: int) -> None:
    """This worker computed the leg's prompt: `row` is the first token.

    All choices begin in the same step and are sent together. If the leg was resumed or preempted,
    its first tokens are sent like all others.
    """
    rows = range(row, min(row + leg.request.choices, len(tokens.request_ids)))
    firsts = [i for i in rows if tokens.request_ids[i] == leg.id and tokens.indices[i] == 0]
    if len(firsts) == leg.request.choices:
        leg.send_first_tokens([tokens.record(i) for i in firsts])
    leg.compute(tokens.at_ns)
