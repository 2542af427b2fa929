"""The fault-free run: every request of a run on one engine in this process, with the margins.

A margin says how far a token was from being another one (`engine.sampling.ops.Drawn`). It is kept
by the sampler and matched with request, choice and index when the step is launched, on the step
loop's thread, which owns what that takes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.inference.v1 import inference_pb2 as api
from chaos.checker import Choice, Token
from chaos.history import Ask
from engine.config import EngineConfig
from engine.engine import Engine
from engine.step.executor import Launched
from engine.step.plan import StepPlan
from engine.step.sampling import Masks
from engine.types import (
    EndReason,
    Event,
    NewTokens,
    Request,
    RequestFailed,
    SamplingParams,
    SequenceEnded,
    StopRules,
)
from router.structure.grammar import Grammar

TIMEOUT_S = 60.0
REASONS = {
    EndReason.LENGTH: "LENGTH",
    EndReason.END_OF_SEQUENCE: "END_OF_SEQUENCE",
    EndReason.STOP_TOKEN: "STOP",
}


class ReferenceEngine:
    """Answers asks without faults. Small enough to run beside the cluster."""

    def __init__(self, model: Path) -> None:
        config = EngineConfig(
            model=str(model), num_pages=1200, max_sequences=64, max_step_tokens=256
        )
        self._engine = Engine.build(config)
        self._margins = _Margins(self._engine)
        self._engine.start()

    def answer(self, asks: Sequence[Ask]) -> Mapping[int, tuple[Choice, ...]]:
        """By the number of the ask; nothing for those whose form crashes."""
        self._margins.forget()
        runs = [_Run(ask) for ask in asks if not ask.crash]
        for run in runs:
            self._engine.submit(run.request, run.sink)
        for run in runs:
            assert run.done.wait(TIMEOUT_S), "the fault-free run hangs"
        answered = {run.ask.number: run.choices(self._margins) for run in runs}
        return {ask.number: answered.get(ask.number, ()) for ask in asks}

    def stop(self) -> None:
        self._engine.stop()


def _grammar(option: str, text: str) -> str:
    """As the router writes it."""
    if not option:
        return ""
    grammar = Grammar({})
    schema = api.JsonSchema(schema=text)
    grammar.structure(
        api.Structure(json_schema=schema) if option == "json_schema" else api.Structure(regex=text)
    )
    return grammar.text()


class _Run:
    """One ask on its way."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.done = threading.Event()
        self.request = Request(
            id=ask.number.to_bytes(16, "big"),
            prompt_ids=np.array(ask.prompt, np.int32),
            sampling=SamplingParams(
                temperature=ask.temperature,
                seed=ask.seed,
                frequency_penalty=ask.frequency_penalty,
                grammar=_grammar(*ask.form),
            ),
            stop=StopRules(ask.max_tokens, ignore_eos=ask.ignore_eos),
            choices=ask.choices,
        )
        self._tokens: list[list[int]] = [[] for _ in range(ask.choices)]
        self._reasons = [""] * ask.choices

    def sink(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case NewTokens():
                    for choice, token in zip(event.choices, event.token_ids, strict=True):
                        self._tokens[choice].append(int(token))
                case SequenceEnded():
                    self._reasons[event.choice] = REASONS[event.reason]
                    if event.last:
                        self.done.set()
                case RequestFailed():
                    raise AssertionError(f"the fault-free run failed: {event.reason}")

    def choices(self, margins: _Margins) -> tuple[Choice, ...]:
        return tuple(
            Choice(
                tuple(
                    Token(token, margins.of(self.request.id, number, index))
                    for index, token in enumerate(tokens)
                ),
                self._reasons[number],
            )
            for number, tokens in enumerate(self._tokens)
        )


class _Margins:
    """Stands between step loop, executor and sampler, and takes notes."""

    def __init__(self, engine: Engine) -> None:
        loop = engine._loop
        self._scheduler, self._executor = loop._scheduler, loop._executor
        loop._executor = self
        sampler: Any = self._executor._sampler
        sampler._record_margins = True
        self._sample = sampler.sample
        sampler.sample = self._take
        self._rows: dict[int, list[tuple[bytes, int, int]]] = {}
        self._found: dict[tuple[bytes, int, int], float] = {}

    def of(self, request_id: bytes, choice: int, index: int) -> float:
        """The margin of a token."""
        return self._found[request_id, choice, index]

    def forget(self) -> None:
        """Another run begins."""
        self._found.clear()

    def shaped(self, plan: StepPlan) -> StepPlan:
        """See `Executor`."""
        return self._executor.shaped(plan)

    def launch(self, plan: StepPlan) -> Launched:
        """See `Executor`."""
        if plan.sample is not None:
            self._rows[id(plan.sample)] = [
                (owner.active.request.id, owner.choice, int(index))
                for slot, index in zip(plan.sample_slots, plan.sample_indices, strict=True)
                if (owner := self._scheduler.batch.owners[slot]) is not None
            ]
        return self._executor.launch(plan)

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """See `Executor`."""
        return self._executor.mask_bits(count)

    def sample(self, masks: Masks | None) -> None:
        """See `Executor`."""
        self._executor.sample(masks)

    def shutdown(self) -> None:
        """See `Executor`."""
        self._executor.shutdown()

    def _take(self, logits: Any, plan: Any, masks: Any = None) -> Any:
        result = self._sample(logits, plan, masks)
        margins = result.margin.tolist()
        self._found.update(zip(self._rows.pop(id(plan)), margins, strict=True))
        return result
