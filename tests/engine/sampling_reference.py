"""What the sampler's tests share: random requests, and the rules said plainly, one row at a time,
in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.sampling.noise import uniform
from engine.types import SamplingParams, StopRules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.sampling import Sampler


VOCAB = 600
EOS = {2, 9}
NONE = np.zeros(0, np.int32)
FOREVER = StopRules(10**6)
NOISE = 1e-5

Row = NDArray[np.float64]


@dataclass(frozen=True)
class Request:
    """A request with one sequence to draw for."""

    params: SamplingParams
    stop: StopRules
    prompt_ids: Sequence[int] = ()
    choice: int = 0


@dataclass(frozen=True)
class Expected:
    """The token, and how much arithmetic noise it stands."""

    token: int
    margin: float
    """Of the draw; of a greedy token, its lead."""
    edge: float
    """The least distance of any token from an edge of min-p or top-p, in probability."""


def shaped(
    logits: Row, request: Request, generated: Sequence[int], index: int, eos: set[int]
) -> Row:
    """Bans, bias, penalties."""
    params, result = request.params, logits.copy()
    for token, bias in params.logit_bias.items():
        result[token] += bias
    for token in range(len(result)):
        count = sum(token == said for said in generated)
        if count or token in request.prompt_ids:
            rate = params.repetition_penalty
            result[token] = result[token] / rate if result[token] > 0 else result[token] * rate
        result[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    ends = set(request.stop.token_ids) | (set() if request.stop.ignore_eos else eos)
    if index < request.stop.min_tokens:
        result[list(ends)] = -np.inf
    return result


def distribution(logits: Row, params: SamplingParams) -> tuple[Row, float]:
    """What a token is drawn from, and the least distance from a filter's edge."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    edge = np.abs(weights - params.min_p).min() if params.min_p > 0 else np.inf
    weights[weights < params.min_p] = 0
    if 0 < params.top_k < len(weights):
        weights[weights < np.sort(weights)[-params.top_k]] = 0
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        shares = weights[order] / weights.sum()
        before = np.cumsum(shares) - shares
        edge = min(edge, np.abs(before - params.top_p).min())
        weights[order[before >= params.top_p]] = 0
    return weights / weights.sum(), float(edge)


def expected(
    logits: Row, request: Request, generated: Sequence[int], index: int, eos: set[int]
) -> Expected:
    """The token that the sampler must choose."""
    row, params = shaped(logits, request, generated, index, eos), request.params
    if params.temperature == 0:
        second, first = np.sort(row)[-2:]
        return Expected(int(row.argmax()), float(first - second), np.inf)
    seed, choice = np.array([params.seed], np.uint64), np.array([request.choice])
    number = float(uniform(seed, choice, np.array([index]))[0])
    probabilities, edge = distribution(row, params)
    ends = np.cumsum(probabilities)
    token = int(np.argmax(ends > number))
    margin = min(ends[token] - number, number - (ends[token] - probabilities[token]))
    return Expected(token, float(margin), edge)


def random_params(rng: np.random.Generator) -> SamplingParams:
    def sometimes(value: float, otherwise: float) -> float:
        return float(value) if rng.random() < 0.4 else otherwise

    return SamplingParams(
        temperature=float(rng.choice([0, 0.3, 0.8, 1, 2])),
        top_p=sometimes(rng.uniform(0.05, 1), 1.0),
        top_k=int(sometimes(rng.integers(1, 2 * VOCAB), 0)),
        min_p=sometimes(rng.uniform(0, 0.3), 0.0),
        frequency_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        presence_penalty=sometimes(rng.uniform(-2, 2), 0.0),
        repetition_penalty=sometimes(rng.uniform(0.5, 2), 1.0),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logit_bias={int(rng.integers(VOCAB)): float(rng.uniform(-9, 9)) for _ in range(5)}
        if rng.random() < 0.3
        else {},
    )


def random_request(rng: np.random.Generator) -> Request:
    stop = StopRules(
        max_tokens=1000,
        min_tokens=int(rng.choice([0, 0, 4])),
        token_ids=frozenset(rng.integers(0, VOCAB, int(rng.choice([0, 3]))).tolist()),
        ignore_eos=bool(rng.random() < 0.3),
    )
    prompt = tuple(rng.integers(0, VOCAB, 20).tolist())
    return Request(random_params(rng), stop, prompt, int(rng.integers(4)))


def take_slot(
    sampler: Sampler, slot: int, request: Request, generated: list[int] | None = None
) -> None:
    said = np.array(generated or [], np.int32)
    prompt = np.array(request.prompt_ids, np.int32)
    sampler.assign(slot, request.params, request.stop, request.choice, prompt, said)
