"""What transformers finds with beams, and pages as a search holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from engine_kit import Run
from transformers import AutoModelForCausalLM

from engine.beams.params import BeamParams, EarlyStopping
from engine.engine import Engine
from engine.schedule.scheduler import Scheduler

EARLY = {
    EarlyStopping.NO_BETTER: False,
    EarlyStopping.AT_ONCE: True,
    EarlyStopping.NEVER_BETTER: "never",
}
NOISE = 1e-3
"""Sums of log probabilities of a few dozen tokens differ by less."""

Found = list[tuple[list[int], float]]


class Searches:
    """transformers' own searches over one model."""

    def __init__(self, path: Path, **config: Any) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **config)

    def find(
        self,
        prompt: Sequence[int],
        params: BeamParams,
        tokens: int,
        ends: Sequence[int],
        min_tokens: int = 0,
    ) -> Found:
        """All hypotheses, best first, with their scores."""
        out = self._model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=params.width,
            num_return_sequences=params.width,
            length_penalty=params.length_penalty,
            early_stopping=EARLY[params.early_stopping],
            max_new_tokens=tokens,
            min_new_tokens=min_tokens or None,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = out.sequences[:, len(prompt) :].tolist()
        return [
            (_until_end(row, ends, min_tokens), float(score))
            for row, score in zip(rows, out.sequences_scores, strict=True)
        ]


def _until_end(row: list[int], ends: Sequence[int], min_tokens: int) -> list[int]:
    at = [i for i, token in enumerate(row) if token in ends and i >= min_tokens]
    return row[: at[0] + 1] if at else row


def check(run: Run, want: Found) -> None:
    """The same hypotheses in the same order; those whose scores nearly tie in any."""
    got = [(run.tokens[choice], run.ends[choice].score) for choice in range(len(run.tokens))]
    assert [score for _, score in got] == approx([score for _, score in want])
    left = list(want)
    for tokens, score in got:
        near = [one for one in left if abs(one[1] - score) < NOISE]
        assert tokens in [one for one, _ in near], f"not among {len(near)} of this score"
        left.remove(next(one for one in near if one[0] == tokens))
    if all(abs(a[1] - b[1]) > NOISE for a, b in pairwise(want)):
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]


def approx(values: list[float]) -> Any:
    import pytest

    return pytest.approx(values, abs=NOISE)


class Held(NamedTuple):
    """Pages after a step."""

    pages: int
    """What sequences in slots hold, each page once."""
    needed: int
    """Different contents of pages: all tokens up to the end of each."""
    unshared: int
    """What sequences would hold that share nothing."""


@contextmanager
def counting_pages(engine: Engine) -> Iterator[list[Held]]:
    """Counts pages after each settled step."""
    counts: list[Held] = []
    scheduler = engine._loop._scheduler
    settle: Callable[..., None] = scheduler.settler.settle

    def counted(*args: Any, **options: Any) -> None:
        settle(*args, **options)
        counts.append(_held(scheduler))

    scheduler.settler.settle = counted  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        scheduler.settler.settle = settle  # type: ignore[method-assign]


def _held(scheduler: Scheduler) -> Held:
    slots, size = scheduler.batch.slots, scheduler.config.page_size
    pages, contents, unshared = set[int](), set[bytes](), 0
    for sequence in scheduler.batch.owners:
        if sequence is None:
            continue
        slot = sequence.slot
        pages.update(slots.pages(slot).tolist())
        unshared += int(slots.page_count[slot])
        prompt = sequence.active.request.prompt_ids
        tokens = np.concatenate([prompt, slots.output_ids(slot)])[: slots.kv_len[slot] + 1]
        ends = range(size, int(slots.page_count[slot]) * size + 1, size)
        contents.update(tokens[:end].tobytes() for end in ends)
    return Held(len(pages), len(contents), unshared)
