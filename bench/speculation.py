"""What verifying drafts brings one engine on a GPU, in turns with an engine without.

    python -m bench.speculation [--drafters suffix eagle3 mtp] [--precisions bf16 fp8]
                                [--shape NAME] [--cases NAME ...] [--repeats 5] [--copying]
                                [--profile] [--json FILE] and the options of engines of bench.engine

Dummy weights of the 8B shape, greedy, lengths forced, three drafts a row. Random weights accept
nothing, so `debug.synthetic_acceptance` accepts each draft with a probability: the device does all
of the work, and what it says has no meaning. `off` is an engine without drafts, `one` the other
engine with steps of one token a row: what it costs to have drafts configured.

Columns: output tokens a second of the whole run, from the first submission; and the decode rate,
from the first token of the last sequence to the end of the first sequence. `x` is the ratio to
`off`, medians of the repeats. `tokens` are those of a row and step, `width` that of most steps.

`eagle3` is a head of random weights with the sizes of those published for Llama 3.1 8B: one layer,
32,000 tokens that may be drafted. `mtp` is the own layer of a shape that has one, such as `--shape
glm-4.5-air-cut`. `prompts` are prompts alone, of which a head keeps K and V.

`--copying`: one row, seven drafts of the suffix drafter whose matches all hold (a probability of
0.97), as in an answer that copies its prompt. `--profile`: the kernels of a step of four tokens,
and of prompts in both engines.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.engine import (
    PRECISIONS,
    SHAPE,
    Case,
    Watch,
    add_engine_options,
    free_memory,
    profile,
    run_case,
)
from bench.engine import build as build_engine
from bench.harness import write_json
from engine.engine import Engine
from engine.step.plan import StepPlan, StepResult
from engine.types import Event, NewTokens, SequenceEnded

CASES: Final = {
    "1": Case(1, 128, 256, 0, 0, 0),
    "64": Case(64, 1024, 256, 0, 0, 0),
    "256": Case(256, 128, 256, 0, 0, 0),
    "prompts": Case(24, 4096, 1, 0, 0, 0),
}
PROMPTS: Final = "prompts"
DRAFTERS: Final = {
    "suffix": "suffix", "eagle3": str(SHAPE.with_name("eagle3-llama-8b")), "mtp": "mtp"
}  # fmt: skip
ALPHAS: Final = (0.8, 0.6)
DRAFTS: Final = 3
COPIED: Final = 7
COPYING: Final = 0.97
KV_TOKENS: Final = 110_000
"""Pool of each of the two engines."""


class DecodeWatch(Watch):
    """Counts the tokens that come while all sequences decode, too."""

    def __init__(self, expected: int) -> None:
        super().__init__(expected)
        self._expected = expected
        self._started: set[bytes] = set()
        self._all_started = self._first_end = 0.0
        self._tokens = 0

    def __call__(self, events: Sequence[Event]) -> None:
        """See `engine.types.Sink`."""
        super().__call__(events)
        now = self.step_times[-1]
        for event in events:
            if isinstance(event, NewTokens):
                self._count(event, now)
            if isinstance(event, SequenceEnded):
                self._first_end = self._first_end or now

    def _count(self, event: NewTokens, now: float) -> None:
        if not self._all_started:
            self._started.update(event.request_ids)
            if len(self._started) == self._expected:
                self._all_started = now
        elif not self._first_end:
            self._tokens += len(event.token_ids)

    @property
    def decode_rate(self) -> float:
        """Tokens a second while all sequences decode."""
        return self._tokens / max(self._first_end - self._all_started, 1e-9)


class Steps:
    """Listens to the steps of an engine with drafts."""

    def __init__(self, engine: Engine) -> None:
        self.widths: Counter[int] = Counter()
        self.tokens = self.rows = 0
        settler = engine._loop._scheduler.settler
        settle = settler.settle

        def heard(plan: StepPlan, result: StepResult, *rest: Any) -> None:
            if plan.num_decodes and result.counts is not None:
                self.widths[plan.width] += 1
                self.tokens += int(result.counts[: plan.num_decodes].sum())
                self.rows += plan.num_decodes
            settle(plan, result, *rest)

        settler.settle = heard  # type: ignore[method-assign,assignment]

    def take(self) -> tuple[float, int]:
        """Tokens of a row and step, and the commonest width, since the last call."""
        width = self.widths.most_common(1)[0][0] if self.widths else 0
        tokens = self.tokens / max(self.rows, 1)
        self.widths.clear()
        self.tokens = self.rows = 0
        return tokens, width


class One:
    """Steps of one token a row."""

    most = 1

    def choose(self, rows: int, room: int) -> int:
        """See `engine.speculation.widths.Widths`."""
        return 1

    def settled(self, *_: object) -> None:
        """Learns nothing."""


def build(
    arguments: argparse.Namespace,
    precision: str,
    drafts: int,
    few: bool = False,
    drafter: str = "suffix",
) -> Engine:
    """An engine, ready; 0 drafts: without. `few`: for one row."""
    options: dict[str, Any] = dict(PRECISIONS[precision])
    options |= {"num_pages": 600 if few else KV_TOKENS // 16, "max_context_tokens": 8192}
    if few:
        options["max_sequences"] = 4
    if drafts:
        options |= {
            "speculation": DRAFTERS[drafter], "draft_tokens": drafts,
            "synthetic_acceptance": ALPHAS[0],
        }  # fmt: skip
    return build_engine(arguments, model=SHAPE.with_name(arguments.shape), options=options)


def drafting(engine: Engine) -> Any:
    """Its executor, which has the drafts."""
    return engine._loop._executor


def accept(engine: Engine, alpha: float) -> None:
    """From now on it accepts drafts with another probability."""
    executor = drafting(engine)
    executor._drafting = executor._drafting._replace(synthetic=alpha)
    executor._drawing._drafting = executor._drafting


def run(engine: Engine, case: Case, seed: int) -> tuple[float, float]:
    """Tokens a second of the whole run, and the decode rate."""
    watch = DecodeWatch(case.prompts)
    seconds = run_case(engine, case, seed, watch=watch)[0]
    return case.counted_tokens / seconds, watch.decode_rate


def compare(
    kind: tuple[str, str], name: str, off: Engine, on: Engine, steps: Steps, repeats: int
) -> list[dict[str, Any]]:
    """A case by both engines in turns. `kind`: precision and drafter."""
    case, measured = CASES[name], on._loop._scheduler.planner._widths
    rates: dict[str, list[tuple[float, float]]] = {}
    heard: dict[str, tuple[float, int]] = {}
    for repeat in range(-1, repeats):  # The first one warms up.
        for way in ("off", "one") if name == PROMPTS else ("off", "one", *map(str, ALPHAS)):
            engine = off if way == "off" else on
            if way == "one" and repeat >= 0 and repeat % 2 == 0 and name not in ("1", PROMPTS):
                continue
            if way != "off":
                on._loop._scheduler.planner._widths = One() if way == "one" else measured
                accept(on, 0.0 if way == "one" else float(way))
            pair = run(engine, case, 100 + repeat)
            if repeat >= 0:
                rates.setdefault(way, []).append(pair)
                heard[way] = steps.take()
    on._loop._scheduler.planner._widths = measured
    base = medians(rates["off"])
    figures = []
    for way, found in rates.items():
        whole, decode = medians(found)
        tokens, width = heard[way]
        figures.append({
            "precision": kind[0], "drafter": kind[1], "case": name, "way": way, "whole": whole,
            "decode": decode, "whole_x": whole / base[0], "decode_x": decode / (base[1] or 1.0),
            "tokens": tokens, "width": width, "rates": found,
        })  # fmt: skip
        print(line(figures[-1]), flush=True)
    return figures


def medians(rates: list[tuple[float, float]]) -> tuple[float, float]:
    """Median rates of the whole runs, and of decoding."""
    whole, decode = (statistics.median(column) for column in zip(*rates, strict=True))
    return whole, decode


def line(figure: dict[str, Any]) -> str:
    """A line of the table."""
    return (
        f"{figure['precision']:>7} {figure['drafter']:>7} {figure['case']:>7} {figure['way']:>8}"
        f" {figure['whole']:9.1f} {figure['whole_x']:6.3f} x {figure['decode']:9.1f}"
        f" {figure['decode_x']:5.2f} x {figure['tokens']:6.2f} {figure['width']:5d}"
    )


def copying(arguments: argparse.Namespace, precision: str, off: Engine) -> dict[str, Any]:
    """One row whose answer copies its prompt."""
    engine, repeats = build(arguments, precision, COPIED, few=True), arguments.repeats
    accept(engine, COPYING)
    steps, rates = Steps(engine), []
    for repeat in range(-1, repeats):
        pair = run(off, CASES["1"], 100 + repeat), run(engine, CASES["1"], 100 + repeat)
        if repeat >= 0:
            rates.append(pair)
    tokens, width = steps.take()
    engine.stop()
    base, got = medians([pair[0] for pair in rates]), medians([pair[1] for pair in rates])
    figure = {
        "precision": precision, "drafter": "suffix", "case": "1", "way": "copying",
        "whole": got[0], "decode": got[1], "whole_x": got[0] / base[0],
        "decode_x": got[1] / base[1], "tokens": tokens, "width": width, "rates": rates,
    }  # fmt: skip
    print(line(figure), flush=True)
    return figure


def main() -> None:
    """Measures what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_engine_options(parser)
    parser.add_argument("--precisions", nargs="+", default=["bf16"], choices=list(PRECISIONS))
    parser.add_argument("--drafters", nargs="+", default=["suffix"], choices=list(DRAFTERS))
    parser.add_argument("--shape", default=SHAPE.name, help="of bench/shapes")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--copying", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: list[dict[str, Any]] = []
    for precision in arguments.precisions:
        off = build(arguments, precision, 0)
        for drafter in arguments.drafters:
            figures += with_drafter(arguments, (precision, drafter), off)
            write_json(arguments.json, figures)
            free_memory()
        if arguments.copying:
            figures.append(copying(arguments, precision, off))
        off.stop()
        del off
        free_memory()
    print(f"{'case':>23} {'way':>8} {'whole':>9} {'':>8} {'decode':>9} {'':>7} tokens width")
    for figure in figures:
        print(line(figure))
    write_json(arguments.json, figures)


def with_drafter(
    arguments: argparse.Namespace, kind: tuple[str, str], off: Engine
) -> list[dict[str, Any]]:
    """All cases with a precision and a drafter."""
    on = build(arguments, kind[0], DRAFTS, drafter=kind[1])
    steps, figures = Steps(on), []
    print_captured(on)
    for name in arguments.cases:
        figures += compare(kind, name, off, on, steps, arguments.repeats)
        if arguments.profile and name != "256":
            accept(on, ALPHAS[0])
            for engine in (off, on) if name == PROMPTS else (on,):
                print(profile(engine, name, rows=22, cases=CASES), flush=True)
    on.stop()
    return figures


def print_captured(engine: Engine) -> None:
    """The time of a step by rows and width, as it was measured while graphs were captured."""
    for rows in (1, 8, 64, 256):
        own = {
            shape.width: 1e3 * seconds
            for shape, seconds in drafting(engine).step_times.items()
            if shape[0] == rows and shape.differ
        }
        print(f"captured, {rows} rows: " + ", ".join(f"{w}: {own[w]:.3f} ms" for w in sorted(own)))


if __name__ == "__main__":
    main()
