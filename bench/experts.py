"""Models with experts on a GPU: tokens a second, experts read a step, and TB/s over them.

python -m bench.experts [--shapes NAME ...] [--precisions NAME ...] [--cases NAME ...]
                        [--ranks N [--ways tp experts groups] [--turns 1]]
                        [--repeats 1] [--json FILE] [--profile]
                        and the options of engines of bench.engine

As `bench.engine`: dummy weights, random token ids, greedy, lengths forced, no prefix cache. Rows
and layers get experts that were drawn at random before the engine was built: dummy weights may send
all rows to the same experts, and then few are read. The router's product is computed, too.
`--profile` prints, after a shape's cases, where the device's time goes in each. With `--ranks`
(GPUs of this host) each way has an engine of its own: `tp` cuts every expert, `experts` gives each
rank whole ones. `groups` has a worker on each GPU, which hold the experts together and divide the
prompts of a case, its rows and the tokens of a step between them. `--turns 2` runs all again, the
last one first. `target`, `vllm` and `floor` are those of one GPU.

`experts` is how many of a layer's experts a step of that many rows takes, on average. `TB/s` is the
weights of those in all layers by the median time of a step, in which attention, head and all else
are, too. `vllm` is vLLM 0.25.1 on one H200 with dummy weights, whose routing was concentrated: it
is no bound.

Below a case stands for each worker where its time went (`bench.step_records`): in steps, waiting
for its turn in a group, between steps, before the first and after the last. `--json` has each step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.engine import (
    Case,
    Watch,
    add_engine_options,
    build,
    free_memory,
    measure,
    profile,
    run_case,
)
from bench.harness import write_json
from bench.step_records import StepRecords, spent
from engine.cuda import feed_forward
from engine.cuda.experts.routing import route
from engine.model.config import ExpertsConfig
from engine.model.decoder import Model
from engine.model.experts.config import EACH, Held, Routing
from engine.model.experts.routing import Chosen
from engine.model.experts.weights import ExpertWeights
from engine.model.families import read_config
from engine.model.precision.choice import Precision
from engine.model.precision.formats import read_format
from engine.step.dispatch import place_of

SHAPES: Final = Path(__file__).parent / "shapes"
PRECISIONS: Final[dict[str, dict[str, Any]]] = {"as-is": {}, "fp8": {"quantization": "fp8"}}
"""As-is: bf16, but what the shape's config says is quantised."""
WAYS: Final = ("tp", "experts", "groups")
Run = Callable[..., tuple[float, Watch]]
Steps = list[dict[str, Any]]
"""What `StepRecords` took."""
BEGINNINGS: Final = 997
"""Places of layers in the numbers by which experts are drawn. A prime: none repeats soon."""
CASES: Final[dict[tuple[str, str], dict[str, Case]]] = {
    ("qwen3-30b-a3b", "as-is"): {
        "prefill-1024": Case(128, 1024, 1, 69_300, 0, 72_000),
        "decode-1": Case(1, 128, 256, 237, 390, 330),
        "64x1024+256": Case(64, 1024, 256, 2_300, 3_000, 2_700),
        "256x128+512": Case(256, 128, 512, 11_000, 12_900, 12_000),
    },
    ("qwen3-30b-a3b", "fp8"): {
        "prefill-1024": Case(128, 1024, 1, 90_700, 0, 95_000),
        "decode-1": Case(1, 128, 256, 230, 530, 400),
        "64x1024+256": Case(64, 1024, 256, 5_000, 4_500, 4_200),
        "256x128+512": Case(256, 128, 512, 22_500, 20_000, 18_000),
    },
    ("deepseek-v2-lite", "as-is"): {
        "prefill-1024": Case(128, 1024, 1, 84_964, 0, 85_000),
        "decode-1": Case(1, 128, 256, 263, 0, 380),
        "64x1024+256": Case(64, 1024, 256, 6_792, 0, 6_800),
        "256x128+512": Case(256, 128, 512, 29_577, 0, 29_600),
    },
    ("deepseek-v3-6-layers", "fp8"): {
        "decode-1": Case(1, 128, 256, 0, 0, 0),
        "64x1024+256": Case(64, 1024, 256, 0, 0, 0),
    },
    ("glm-4.5-air-cut", "as-is"): {
        "prefill-1024": Case(128, 1024, 1, 0, 0, 0),
        "decode-1": Case(1, 128, 256, 0, 0, 0),
        "64x1024+256": Case(64, 1024, 256, 0, 0, 0),
    },
    ("gpt-oss-20b", "as-is"): {"decode-1": Case(1, 128, 256, 0, 620, 450)},
    ("qwen3.5-35b-a3b", "fp8"): {
        "prefill-1024": Case(128, 1024, 1, 61_105, 110_000, 81_000),
        "decode-1": Case(1, 128, 256, 212, 1_000, 350),
        "64x1024+256": Case(64, 1024, 256, 2_836, 4_250, 3_400),
        "256x128+512": Case(256, 128, 512, 7_966, 11_800, 9_500),
    },
}
"""By shape and precision. `floor` is what memory allows; 0: not known. What vLLM does with DeepSeek
and Qwen3.5 is of one H100, and so is the floor of Qwen3.5."""


class Experts(NamedTuple):
    """The experts of a model."""

    in_layer: int
    chosen: int
    each_bytes: float
    """Weights of one expert in each layer, all layers together."""


def experts_of(shape: str, options: Mapping[str, Any], device: str = "cuda") -> Experts:
    """Experts of a shape as `device` keeps them. No memory is taken."""
    folder = SHAPES / shape
    config, stated = read_config(folder), json.loads((folder / "config.json").read_text())
    form = read_format(stated, folder)
    precision = Precision(torch.device(device), torch.bfloat16, form, **options)
    model = Model(config, torch.bfloat16, torch.device("meta"), precision)
    weights = [each for each in model.modules() if isinstance(each, ExpertWeights)]
    size = sum(t.numel() * t.element_size() for each in weights for t in each.parameters())
    routing = next(
        layer.feed_forward.routing
        for layer in config.layers
        if isinstance(layer.feed_forward, ExpertsConfig)
    )
    return Experts(routing.experts, routing.chosen, size / routing.experts)


def experts_read(experts: Experts, rows: int) -> float:
    """How many of a layer's experts so many rows take, if each row draws its own at random."""
    missed = (1 - experts.chosen / experts.in_layer) ** rows
    return experts.in_layer * (1 - missed)


@contextmanager
def even_routing(experts: int, step_tokens: int, first: int = 0) -> Iterator[None]:
    """Engines that are built inside get their experts from random numbers, on all of their ranks.
    Each layer begins elsewhere in them, the first one at `first`."""
    with (
        TemporaryDirectory() as folder,
        mock.patch.object(sys, "path", [folder, *sys.path]),
        mock.patch.object(feed_forward, "route", Drawn(experts, step_tokens, first)),
    ):
        # Rank 0 gives its path to the processes of the others.
        Path(folder, "sitecustomize.py").write_text(
            "from engine.cuda import feed_forward\nfrom bench.experts import Drawn\n"
            f"feed_forward.route = Drawn({experts}, {step_tokens})\n"
        )
        yield


class Drawn:
    """Experts by random numbers, the same on every rank."""

    def __init__(self, experts: int, step_tokens: int, first: int = 0) -> None:
        self._shape = step_tokens + BEGINNINGS, experts
        self._calls = itertools.count(first)
        self._numbers: Tensor | None = None

    def __call__(
        self, logits: Tensor, routing: Routing, bias: Tensor | None, which: Held = EACH
    ) -> Chosen:
        """See `engine.cuda.experts.routing.route`."""
        if self._numbers is None:
            drawn = torch.Generator(logits.device).manual_seed(1)
            self._numbers = torch.rand(self._shape, generator=drawn, device=logits.device)
        first = next(self._calls) % BEGINNINGS
        return route(self._numbers[first : first + len(logits)], routing, bias, which)


def run_shape(arguments: argparse.Namespace, shape: str, precision: str) -> list[dict[str, Any]]:
    """All cases of a shape in a precision, each way; prints tables and returns what they say."""
    rows, ways = [], arguments.ways if arguments.ranks > 1 else ["tp"]
    for turn in range(arguments.turns):
        for way in reversed(ways) if turn % 2 else ways:
            own = run_way(arguments, shape, precision, way)
            rows += [{"way": way, "ranks": arguments.ranks, "turn": turn, **row} for row in own]
            free_memory()
    return rows


def run_way(
    arguments: argparse.Namespace, shape: str, precision: str, way: str
) -> list[dict[str, Any]]:
    """All cases with one engine."""
    cases = CASES[shape, precision]
    experts = experts_of(shape, PRECISIONS[precision])
    options = PRECISIONS[precision] | {
        "tp": arguments.ranks,
        "expert_parallel": way == "experts" and arguments.ranks > 1,
    }
    print(f"{shape}, {precision}, {arguments.ranks} ranks, {way}")
    with ExitStack() as stack:
        stack.enter_context(even_routing(experts.in_layer, arguments.step_tokens))
        run: Run = run_case
        others = list[Steps]()
        if way == "groups":
            group = stack.enter_context(Group(arguments.ranks, shape, precision))
            options = PRECISIONS[precision] | group.options
            arguments, run, others = group.arguments, group.run, group.steps
        engine = build(arguments, model=SHAPES / shape, options=options)
        watched = Watched(StepRecords(engine), run, others)
        print(
            f"{'':>14} {'rate':>10} {'target':>10} {'vllm':>10} {'floor':>10} {'p50 ms':>8}"
            f" {'experts':>8} {'TB/s':>6}"
        )
        rows = []
        for name, case in cases.items():
            if arguments.cases and name not in arguments.cases:
                continue
            rows.append(row_of(engine, name, case, experts, arguments.repeats, watched.run))
            print(line(rows[-1]))
            print(*watched.lines(), sep="\n", flush=True)
            rows[-1]["steps"] = watched.steps
        for row in rows if arguments.profile and way != "groups" else ():
            print(profile(engine, row["case"], rows=20, cases=cases), flush=True)
        engine.stop()
    return [{"shape": shape, "precision": precision, **row} for row in rows]


def row_of(
    engine: Any,
    name: str,
    case: Case,
    experts: Experts,
    repeats: int,
    run: Run = run_case,
) -> dict[str, Any]:
    """One case, measured. Steps of prompts alone read all experts, so they have no TB/s."""
    outcome = measure(engine, name, repeats, cases={name: case}, run=run)
    read = experts_read(experts, case.prompts)
    seconds = outcome.step_p50_ms / 1e3
    speed = read * experts.each_bytes / seconds / 1e12 if case.output_tokens > 1 else 0.0
    return {
        "case": name,
        "rate": outcome.rate,
        "target": case.target,
        "vllm": case.vllm,
        "floor": case.floor,
        "p50_ms": outcome.step_p50_ms,
        "experts": read if case.output_tokens > 1 else float(experts.in_layer),
        "tb_per_s": speed,
    }


class Watched:
    """Runs cases, and knows where the time of the last one went."""

    def __init__(self, records: StepRecords, run: Run, others: list[Steps]) -> None:
        """`others`: where `run` leaves the steps of other workers."""
        self._records, self._run, self._others = records, run, others
        self._began_s = self._over_s = 0.0
        self.steps: list[Steps] = []
        """Steps of each worker."""

    def run(self, *given: Any) -> tuple[float, Watch]:
        """As `run_case`."""
        self._records.taken()
        self._began_s = time.monotonic()
        found = self._run(*given)
        self._over_s = time.monotonic()
        self.steps = [self._records.taken(), *self._others]
        return found

    def lines(self) -> Iterator[str]:
        """One for each worker that had steps."""
        for rank, steps in enumerate(self.steps):
            if (found := spent(steps, self._began_s, self._over_s)) is not None:
                yield f"{f'worker {rank}':>14} {found.line()}"


class Group:
    """Workers on the other GPUs, which run their parts of cases. A context manager."""

    def __init__(self, ranks: int, shape: str, precision: str) -> None:
        self.arguments = divided(parse(), ranks)
        """Options of the worker here."""
        self._ranks, self._what = ranks, ["--shapes", shape, "--precisions", precision]
        self._folder = TemporaryDirectory()
        self.options = {"expert_group": self._place(0)}
        self.steps: list[Steps] = []
        """Steps of the other workers in the last case."""

    def _place(self, rank: int) -> str:
        return f"{self._folder.name}/group?rank={rank}&ranks={self._ranks}"

    def __enter__(self) -> Group:
        command = [sys.executable, "-m", "bench.experts", *sys.argv[1:], *self._what, "--member"]
        self._others = [
            subprocess.Popen(
                [*command, self._place(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(1, self._ranks)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for other in self._others:
            other.kill()
            other.wait()
        self._folder.cleanup()

    def run(self, engine: Any, case: Case, seed: int, *given: Any) -> tuple[float, Watch]:
        """As `run_case`, on all workers. Steps are those that the worker here runs."""
        begin = time.perf_counter()
        own, *rest = shares(case, self._ranks)
        for other, share in zip(self._others, rest, strict=True):
            assert other.stdin is not None
            print(share.prompts, case.prompt_tokens, case.output_tokens, seed, file=other.stdin)
            other.stdin.flush()
        _, watch = run_case(engine, own, seed, *given)
        told = []
        for other in self._others:
            assert other.stdout is not None
            told.append(other.stdout.readline())
            assert told[-1], "a worker has ended"
        seconds = time.perf_counter() - begin
        self.steps[:] = map(json.loads, told)
        return seconds, watch


def divided(arguments: argparse.Namespace, ranks: int) -> argparse.Namespace:
    """The options of one of so many workers: all of them run as many tokens as one engine."""
    arguments.sequences = -(-arguments.sequences // ranks)
    arguments.step_tokens = max(2048, arguments.step_tokens // ranks)
    return arguments


def shares(case: Case, ranks: int) -> list[Case]:
    """What each worker has of a case, the first one the most."""
    counts = (len(range(rank, case.prompts, ranks)) for rank in range(ranks))
    return [replace(case, prompts=count) for count in counts]


def run_member(arguments: argparse.Namespace) -> None:
    """A worker of a group: it runs what its input says."""
    (shape,), (precision,) = arguments.shapes, arguments.precisions
    place = place_of(arguments.member)
    options = PRECISIONS[precision] | {"expert_group": arguments.member}
    arguments = divided(arguments, place.ranks)
    experts, first = experts_of(shape, PRECISIONS[precision]), BEGINNINGS // place.ranks
    with (
        redirect_stdout(sys.stderr),
        even_routing(experts.in_layer, arguments.step_tokens, first * place.rank),
    ):
        engine = build(arguments, model=SHAPES / shape, options=options)
    records = StepRecords(engine)
    for told in sys.stdin:
        prompts, prompt_tokens, output_tokens, seed = map(int, told.split())
        if prompts:
            run_case(engine, Case(prompts, prompt_tokens, output_tokens, 0, 0, 0), seed)
        print(json.dumps(records.taken()), flush=True)


def line(row: Mapping[str, Any]) -> str:
    """A line of the table."""
    return (
        f"{row['case']:>14} {row['rate']:10,.1f} {row['target']:10,.1f} {row['vllm']:10,.1f}"
        f" {row['floor']:10,.1f} {row['p50_ms']:8.2f} {row['experts']:8.1f} {row['tb_per_s']:6.2f}"
    )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_engine_options(parser)
    shapes = sorted({shape for shape, _ in CASES})
    parser.add_argument("--shapes", nargs="+", default=shapes, choices=shapes)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--member", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    return arguments


def main() -> None:
    """Runs what is asked for and prints the tables."""
    arguments = parse()
    if arguments.member:
        run_member(arguments)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rows = []
    for shape, precision in CASES:
        if shape in arguments.shapes and precision in arguments.precisions:
            rows += run_shape(arguments, shape, precision)
            free_memory()
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
