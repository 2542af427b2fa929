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

    @property
    def grid(self) -> str:
        """Its stages and ranks."""
        stages = f"{self.stages} stages of " if self.stages > 1 else ""
        return f"{stages}{self.ranks} rank{'s' if self.ranks > 1 else ''}"

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
    decode: Kind
    """How decode workers have the model."""
    rates: tuple[Rates, Rates]
    """Rates of prefill workers, or of those that do both, and of decode workers."""
    served: Served
    kept: float
    kept_of_more: float

    @property
    def name(self) -> str:
        """Its workers, and how they have the model."""
        if self.kind == self.decode:
            return f"{self.plan}{self.kind}"
        fp8 = ", FP8 weights" if self.kind.fp8 else ""
        return f"{self.plan}, P of {self.kind.grid}, D of {self.decode.grid}{fp8}"


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
    rates = {
        kind: rates_of(gpu, parameters, kv_bytes, kind.ranks, fp8=kind.fp8, stages=kind.stages)
        for kind in kinds
    }
    fit = [kind for kind in kinds if rates[kind].kv_tokens >= longest]
    for kind, decode, plan in _plans(gpus, fit):
        both = rates[kind], rates[decode]
        served = simulate(asked, plan, *both)
        kept = served.kept(*level)
        of_more = simulate(more, plan, *both).kept(*level)
        found.append(Option(plan, kind, decode, both, served, kept, of_more))
    if not found:
        raise WrongUseError(
            f"the model, with KV for a request of {longest} tokens, fits none of {gpus} such GPUs"
        )
    return sorted(
        found,
        key=lambda one: (
            -round(one.kept, 2),
            -one.kept_of_more,
            one.kind.stages,
            one.kind != one.decode,
        ),
    )


def _plans(gpus: int, kinds: Sequence[Kind]) -> Iterator[tuple[Kind, Kind, Plan]]:
    """How prefill workers have the model, how decode workers do, and how many there are. Decode
    workers have stages only where prefill workers have as many: a token's way through them is no
    shorter."""
    for kind in kinds:
        if count := gpus // kind.gpus:
            yield kind, kind, Plan(0, 0, count)
        for decode in kinds:
            if decode.fp8 != kind.fp8 or (decode.stages > 1 and decode != kind):
                continue
            for prefill in range(1, 1 + (gpus - decode.gpus) // kind.gpus):
                decodes = (gpus - prefill * kind.gpus) // decode.gpus
                yield kind, decode, Plan(prefill, decodes)


def breaks(option: Option, lengths: Lengths, rate: float, level: Level) -> str:
    """What breaks first when more comes, in words."""
    for times in LOADS:
        served = simulate(lengths.at(times * rate), option.plan, *option.rates)
        if served.kept(*level) >= BROKEN:
            continue
        late = float(np.mean(served.first_s > level.first_s))
        slow = float(np.mean(served.gap_s > level.gap_s))
        what = "first tokens" if late > slow else "times between tokens"
        busy = ", ".join(f"{role} {100 * part:.0f} % busy" for role, part in served.busy.items())
        return f"{what}, at {times * rate:.3g} requests a second ({busy})"
    return f"nothing, up to {LOADS[-1] * rate:.3g} requests a second"
