"""Returns some of a job's choices: those that are best.

A search runs as many choices as it has beams and returns them best first, at its end. `best_of`
draws more choices than are returned. Either way nobody sees a token before the last choice has
ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from baton.inference.v1 import inference_pb2 as api
from router.requests.outputs import Finished, Started, TextDelta

if TYPE_CHECKING:
    from router.jobs import ServedModel
    from router.requests.outputs import Output, OutputBuffer

MAX_BEAM_CANDIDATES: Final = 440
"""So many of a first token fit into a hand-off's notification
(`worker_base.messages.MAX_PAYLOAD_BYTES`)."""


def runs(generation: api.GenerationInput) -> int:
    """Choices that a job runs: at least those that are returned."""
    if generation.HasField("beams"):
        return generation.beams.width
    return max(generation.choices, generation.best_of, 1)


def selects(generation: api.GenerationInput) -> bool:
    """Whether choices are chosen: by a search, or from more than are returned."""
    return generation.HasField("beams") or generation.best_of > max(generation.choices, 1)


def beam_candidates(generation: api.GenerationInput, model: ServedModel) -> int:
    """Tokens that a search reads of each beam, as `engine.beams.params.BeamParams.read`."""
    stop = generation.stop
    ends = len({*stop.token_ids, *(() if stop.ignore_eos else model.eos_token_ids)})
    kept = max(2, 1 + ends) * generation.beams.width
    return kept + (ends if stop.min_tokens else 0)


@dataclass(slots=True, eq=False)
class _Choice:
    deltas: list[TextDelta] = field(default_factory=list)
    end: Finished | None = None

    @property
    def tokens(self) -> int:
        """Number of its tokens."""
        return sum(len(delta.token_ids) for delta in self.deltas)

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of its tokens."""
        logprobs = [one.logprob for delta in self.deltas for one in delta.logprobs]
        return sum(logprobs) / len(logprobs)


class Selection:
    """Keeps the outputs of choices, and passes on those of the best when the last has ended."""

    def __init__(self, generation: api.GenerationInput, buffer: OutputBuffer) -> None:
        self._buffer = buffer
        self._searches = generation.HasField("beams")
        self._returned = max(generation.choices, 1)
        self._with_logprobs = generation.output.logprobs
        self._choices = [_Choice() for _ in range(runs(generation))]

    def put(self, output: Output) -> None:
        """Adds an output, as `OutputBuffer.put`."""
        match output:
            case Started():
                self._buffer.put(output)
            case TextDelta():
                self._choices[output.choice].deltas.append(output)
            case Finished():
                self._choices[output.choice].end = output
                if output.usage is not None:
                    self._pass_on(output)

    def _pass_on(self, last: Finished) -> None:
        best = self._best()
        dropped = sum(choice.tokens for choice in self._choices if choice not in best)
        for index, choice in enumerate(best):
            for delta in choice.deltas:
                logprobs = delta.logprobs if self._with_logprobs else []
                self._buffer.put(replace(delta, choice=index, logprobs=logprobs))
            assert choice.end is not None, "all have ended"
            score = choice.end.score if self._searches else choice.mean_logprob
            end = replace(choice.end, choice=index, score=score, usage=None, timings=None)
            if index + 1 == self._returned:
                end = replace(end, usage=last.usage, timings=last.timings, dropped_tokens=dropped)
            self._buffer.put(end)

    def _best(self) -> list[_Choice]:
        best = self._choices
        if not self._searches:
            best = sorted(best, key=lambda choice: -choice.mean_logprob)
        return best[: self._returned]
