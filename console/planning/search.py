"""Looks for the best workers for a load, and for what breaks first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from console.loadgen.errors import WrongUseError
from console.planning.rates import Gpu, Rates, rates_of
from console.planning.simulation import Asked, Plan, Served, simulate

RANKS: Final = (1, 2, 4, 8)
"""Ranks of a stage that are tried: powers of two divide the heads of most models."""
STAGES: Final = (1, 2, 4)
"""Stages of a worker that are tried."""


class Kind(NamedTuple):
    """How a worker has its model."""

    ranks: int
    """Ranks of each stage."""
    stages: int
    fp8: bool

    @property
    def gpus(self) -> int:
        """GPUs of a worker."""
        return self.ranks * self.stages

    def __str__(self) -> str:
        stages = f", {self.stages} stages each" if self.stages > 1 else ""
        ranks = f", {self.ranks} ranks {'a stage' if stages else 'each'}" if self.ranks > 1 else ""
        return f"{stages}{ranks}{', FP8 weights' if self.fp8 else ''}"


ARRIVALS: Final = 600
"""Requests that are simulated: a quarter of a second each, and p99 of six."""
MORE: Final = 1.5
"""Plans that keep the level alike are told apart by what they keep of so many times the load."""
LOADS: Final = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Multiples of the load at which it is looked what breaks."""
BROKEN: Final = 0.9
"""A plan has broken if it keeps less than this part."""


class Lengths(NamedTuple):
    """Tokens in and out of each request, drawn anew for each load."""

    prompt: Sequence[int]
    output: Sequence[int]

    def at(self, rate: float) -> list[Asked]:
        """Requests at so many a second, at random; always the same ones."""
        draw = np.random.default_rng(0)
        at_s = np.cumsum(draw.exponential(1 / rate, ARRIVALS)).tolist()
        picks = draw.integers(len(self.prompt), size=ARRIVALS).tolist()
        return [
            Asked(when_s, self.prompt[pick], self.output[pick])
            for when_s, pick in zip(at_s, picks, strict=True)
        ]


class Level(NamedTuple):
    """A service level, seconds: of each request, its first token, and p99 of its own gaps."""

    first_s: float
    gap_s: float


class Option(NamedTuple):
    """A plan with what it does."""

    plan: Plan
    kind: Kind
    rates: Rates
    served: Served
    kept: float
    kept_of_more: float

    @property
    def name(self) -> str:
        """Its workers, and how they have the model."""
        return f"{self.plan}{self.kind}"


def options(
    gpu: Gpu,
    gpus: int,
    parameters: float,
    kv_bytes: int,
    lengths: Lengths,
    rate: float,
    level: Level,
    *,
    kinds: Sequence[Kind],
) -> list[Option]:
    """Every plan that fits, the best first. Of those that are alike, the one with fewer stages is.

    Raises:
        WrongUseError: the model fits no number of these GPUs.
    """
    found = []
    asked, more = lengths.at(rate), lengths.at(MORE * rate)
    longest = max(one.prompt_tokens + one.output_tokens for one in asked)
    for kind, plan in _plans(gpus, kinds):
        rates = rates_of(gpu, parameters, kv_bytes, kind.ranks, fp8=kind.fp8, stages=kind.stages)
        if rates.kv_tokens < longest:
            continue
        served = simulate(asked, plan, rates)
        kept = served.kept(*level)
        of_more = simulate(more, plan, rates).kept(*level)
        found.append(Option(plan, kind, rates, served, kept, of_more))
    if not found:
        raise WrongUseError(
            f"the model, with KV for a request of {longest} tokens, fits none of {gpus} such GPUs"
        )
    return sorted(found, key=lambda one: (-round(one.kept, 2), -one.kept_of_more, one.kind.stages))


def _plans(gpus: int, kinds: Sequence[Kind]) -> Iterator[tuple[Kind, Plan]]:
    for kind in kinds:
        count = gpus // kind.gpus
        if count:
            yield kind, Plan(0, 0, count)
        for prefill in range(1, count):
            yield kind, Plan(prefill, count - prefill)


def breaks(option: Option, lengths: Lengths, rate: float, level: Level) -> str:
    """What breaks first when more comes, in words."""
    for times in LOADS:
        served = simulate(lengths.at(times * rate), option.plan, option.rates)
        if served.kept(*level) >= BROKEN:
            continue
        late = float(np.mean(served.first_s > level.first_s))
        slow = float(np.mean(served.gap_s > level.gap_s))
        what = "first tokens" if late > slow else "times between tokens"
        busy = ", ".join(f"{role} {100 * part:.0f} % busy" for role, part in served.busy.items())
        return f"{what}, at {times * rate:.3g} requests a second ({busy})"
    return f"nothing, up to {LOADS[-1] * rate:.3g} requests a second"
