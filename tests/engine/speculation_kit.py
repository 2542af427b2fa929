"""Engines whose drafter says what a test wants."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from engine_kit import Run, build, check_baseline
from torch import Tensor

from engine.config import MOST_DRAFTS
from engine.engine import Engine
from engine.speculation.choosing import DRAFTERS
from engine.speculation.drafter import Drafts
from engine.speculation.tables import SlotTables
from engine.speculation.widths import Widths

Script = Callable[[list[int]], Sequence[int]]
"""Drafts for a sequence, from its tokens so far."""


class ScriptedDrafter:
    """Drafts whatever a script says."""

    name = "scripted"

    def __init__(self, most: int, script: Script) -> None:
        self.most = most
        self._script = script

    def draft(self, tables: SlotTables, slots: Tensor) -> Drafts:
        ids = torch.zeros((len(slots), self.most), dtype=torch.int64)
        ready = torch.zeros(len(slots), dtype=torch.int64)
        lengths = tables.length[slots].tolist()
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
            said = list(self._script(tables.history[slot, : length + 1].tolist()))[: self.most]
            ids[row, : len(said)] = torch.tensor(said, dtype=torch.int64)
            ready[row] = len(said)
        return Drafts(ids.to(tables.device), ready.to(tables.device))


class Switching:
    """Another width each step."""

    most = 1 + MOST_DRAFTS

    def __init__(self) -> None:
        self._turns = itertools.cycle((8, 1, 3, 2, 1, 1, 5, 8, 4))

    def choose(self, rows: int, room: int) -> int:
        return max(1, min(next(self._turns), room))

    def settled(self, *_: object) -> None:
        pass


@contextmanager
def speculating(
    path: Path, script: Script | None = None, widths: Widths | None = None, **options
) -> Iterator[Engine]:
    """An engine with drafts: what the script says, or of the suffix drafter."""
    name = "suffix"
    if script is not None:
        name = "scripted"
        DRAFTERS[name] = lambda most: ScriptedDrafter(most, script)
    engine = build(path, speculation=name, **options)
    DRAFTERS.pop("scripted", None)
    if widths is not None:
        engine._loop._scheduler.planner._widths = widths
    try:
        yield engine
        check_baseline(engine)
    finally:
        engine.stop()


class Oracle:
    """Knows whole sequences, and says what comes next: rightly, or not."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._known: list[list[int]] = []
        self._random = random.Random(1)

    def learn(self, prompt: Sequence[int], outputs: Sequence[Sequence[int]]) -> None:
        """Takes a prompt and what follows it."""
        self._known += [[*prompt, *output] for output in outputs]

    def learn_run(self, run: Run) -> None:
        """Takes what a request has made."""
        self.learn(run.request.prompt_ids.tolist(), run.tokens)

    def right(self, tokens: list[int]) -> Sequence[int]:
        at = len(tokens)
        found = (known[at:] for known in self._known if known[:at] == tokens)
        return next(found, [])[:MOST_DRAFTS]

    def wrong(self, tokens: list[int]) -> Sequence[int]:
        return [(token + 1) % self._vocab for token in self.right(tokens)]

    def half(self, tokens: list[int]) -> Sequence[int]:
        return [token if self._random.random() < 0.7 else 5 for token in self.right(tokens)]

    def random(self, tokens: list[int]) -> Sequence[int]:
        count = self._random.randrange(MOST_DRAFTS + 1)
        return [self._random.randrange(self._vocab) for _ in range(count)]

    def beyond(self, tokens: list[int]) -> Sequence[int]:
        return [*self.right(tokens)[:2], self._vocab, -1, 1 << 31 - 1]

    def scripts(self) -> dict[str, Script]:
        """All that it may say, by name."""
        names = ("right", "wrong", "half", "random", "beyond")
        return {name: getattr(self, name) for name in names}
