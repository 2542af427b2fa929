"""Runs one plan after the other and judges each; see the package."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tiny_families import DENSE, EXPERTS, HYBRIDS
from tiny_models import write_tiny_model
from tokenizers import Tokenizer

from chaos.arena import Arena, Blow
from chaos.checker import Excuses, Violation, check, is_of_form
from chaos.clients import ask_all
from chaos.faults import fired, inflicted
from chaos.figures import Figures
from chaos.history import History
from chaos.plan import RUNS_PER_CLUSTER, RunPlan, Topology, plan_run
from chaos.quiet import Baselines, wait_for_quiet
from chaos.reference import ReferenceEngine
from serving.net.certificates import write_set
from telemetry.names import Metric

OPTIONS: Final = {
    "": {},
    "windows": DENSE["gemma3"] | {"sliding_window": 24},
    "windows alone": DENSE["phi3"],
    "hybrid": HYBRIDS["qwen3_5"],
    "experts": EXPERTS["qwen3_moe"],
}
"""Of the models of `MODELS`."""


@dataclass
class Outcome:
    """How a run went."""

    plan: RunPlan
    histories: Sequence[History]
    violations: Sequence[Violation]
    left: Sequence[str]
    blows: Sequence[Blow]
    took_s: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.violations and not self.left

    def report(self) -> str:
        """For people: what was wrong, and how to see it again."""
        plan = self.plan
        wrong = [str(violation) for violation in self.violations] + list(self.left)
        concerned = {violation.request for violation in self.violations}
        shown = [h.as_json() for h in self.histories if h.ask.number in concerned]
        return "\n".join(
            (
                f"FAILED {plan}",
                *(f"  {text}" for text in wrong),
                f"  again: make chaos SEED={plan.seed} ONLY={plan.number}",
                *(f"  {json.dumps(one)}" for one in shown),
            )
        )


@dataclass
class Harness:
    """Owns the reference engine and the cluster of the present block."""

    workspace: Path
    lenient: bool = False
    """Failures are excused wherever a fault struck, others able to take over or not."""
    tls: bool = False
    """Whether the clusters have TLS, inside and outside."""
    figures: Figures = field(default_factory=Figures)
    _arena: Arena | None = None
    _block: tuple[int, int, Topology] | None = None
    _baselines: Baselines = field(default_factory=Baselines)

    def __post_init__(self) -> None:
        self._models: dict[str, Path] = {}
        self._references: dict[str, ReferenceEngine] = {}
        plain = self._model_of("")
        self._tokenizer = Tokenizer.from_file(str(plain / "tokenizer.json"))
        self._certs = str(self.workspace / "certs") if self.tls else ""
        if self.tls:
            write_set(Path(self._certs), ("prefill", "decode", "both"), (), days=1)

    def run(self, plan: RunPlan) -> Outcome:
        """Runs a plan and judges it. A cluster that was left in a bad state is not used again."""
        began_s = time.monotonic()
        arena = self._arena_of(plan)
        outcome = asyncio.run(self._run(plan, arena))
        outcome.took_s = time.monotonic() - began_s
        if not outcome.is_good:
            self.close_cluster()
        return outcome

    def close_cluster(self) -> None:
        """Ends the processes of the present block."""
        if self._arena is not None:
            self.figures.fetches += asyncio.run(fetches_of(self._arena))
            self.figures.detect(self._arena.blows, self._arena.cluster.logs / "router.log")
            self._arena.stop()
        self._arena = self._block = None

    def close(self) -> None:
        """Ends everything."""
        self.close_cluster()
        for reference in self._references.values():
            reference.stop()

    async def _run(self, plan: RunPlan, arena: Arena) -> Outcome:
        blows = len(arena.blows)
        references = self._references[plan.topology.model].answer(plan.asks)
        left: list[str] = []
        histories: list[History] = []
        points: Counter[str] = Counter()
        try:
            async with inflicted(arena, plan.faults):
                histories = await ask_all(arena.cluster.door, plan.asks, arena.cluster.door_files)
            points = await fired(arena, plan.faults)
        except AssertionError as error:
            left.append(str(error))
        violations = check(histories, references, self._excuses(plan))
        violations += [one for history in histories for one in self._unformed(history)]
        left += [] if left else await wait_for_quiet(arena, self._baselines)
        struck = arena.blows[blows:]
        self.figures.add(plan, histories, references, violations, left, struck, points)
        return Outcome(plan, histories, violations, left, struck)

    def _excuses(self, plan: RunPlan) -> Excuses:
        return Excuses(
            failures=bool(plan.faults) and (self.lenient or not plan.others_can_take_over),
            router_gone=any(f.target == "router" and not f.is_of_spares for f in plan.faults),
            drains=any(f.kind == "restart" for f in plan.faults),
        )

    def _unformed(self, history: History) -> Iterator[Violation]:
        """Of the choices that have ended by themselves."""
        option, form = history.ask.form
        for event in history.events if option else ():
            if event.finish_reason == "END_OF_SEQUENCE":
                text = self._tokenizer.decode(history.tokens(event.choice))
                if not is_of_form(option, form, text):
                    yield Violation("form", history.ask.number, f"choice {event.choice}: {text!r}")

    def _arena_of(self, plan: RunPlan) -> Arena:
        block = plan.seed, plan.number // RUNS_PER_CLUSTER, plan.topology
        if self._arena is None or self._block != block:
            self.close_cluster()
            logs = self.workspace / f"logs-{plan.seed}-{plan.number}"
            model = self._model_of(plan.topology.model)
            self._arena = Arena.start(plan.topology, model, logs, self._certs)
            self._block, self._baselines = block, Baselines()
            asyncio.run(self._warm_up(self._arena))
        return self._arena

    def _model_of(self, name: str) -> Path:
        """The model, with an engine that answers without faults; made at its first use."""
        if name not in self._models:
            path = write_tiny_model(self.workspace / f"model-{name}", **OPTIONS[name])
            self._models[name], self._references[name] = path, ReferenceEngine(path)
        return self._models[name]

    async def _warm_up(self, arena: Arena) -> None:
        """Until peers have met and the first of everything is over; then what is at rest is."""
        await arena.ready()
        asks = [ask for ask in plan_run(0, 0).asks if ask.behaviour == "read"]
        await ask_all(arena.cluster.door, asks, arena.cluster.door_files)
        await wait_for_quiet(arena, self._baselines)


async def fetches_of(arena: Arena) -> Counter[str]:
    """How the fetches of the workers that are alive have ended."""
    found: Counter[str] = Counter()
    for name in arena.topology.workers:
        with contextlib.suppress(OSError):
            for (metric, labels), value in (await arena.metrics(name)).items():
                if metric == Metric.FETCHES + "_total":
                    found[dict(labels)["outcome"]] += int(value)
    return found


@contextmanager
def harness(
    *, lenient: bool = False, workspace: Path | None = None, tls: bool = False
) -> Iterator[Harness]:
    """A harness that leaves no process behind."""
    with contextlib.ExitStack() as stack:
        if workspace is None:
            workspace = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        made = Harness(workspace, lenient, tls)
        stack.callback(made.close)
        yield made


def run_many(
    made: Harness, seed: int, numbers: Sequence[int], say: Callable[[str], None], until_s: float
) -> list[Outcome]:
    """Runs plans until the time is up; says how it goes."""
    outcomes: list[Outcome] = []
    for number in numbers:
        if time.monotonic() > until_s:
            say(f"time is up after {len(outcomes)} runs")
            break
        outcome = made.run(plan_run(seed, number))
        outcomes.append(outcome)
        mark = "ok  " if outcome.is_good else "FAIL"
        say(f"{mark} {outcome.took_s:5.1f} s  {outcome.plan}")
        if not outcome.is_good:
            say(outcome.report())
    return outcomes
