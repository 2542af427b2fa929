"""Hooks for tests, and how they are installed: entry points in a folder of their own.

The fixtures are for modules whose tests run one tiny model with and without hooks.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_kit import Run, finish, held, running, submit
from tiny_models import write_tiny_model

from engine.engine import Engine
from engine.types import FailureReason, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"
QUEST = EXAMPLES / "hook-quest"
PROMPT, NEIGHBOUR = list(range(40, 90)), list(range(200, 270))
CLOSE = 0.15
"""Logits that differ by less may change places where they are rounded in another order."""


@contextmanager
def installed(folder: Path, points: str, *sources: Path) -> Iterator[None]:
    """A distribution with these entry points, for this process and for those that it starts.

    Args:
        folder: where its metadata go.
        points: the text of its `entry_points.txt`.
        sources: folders with its modules.
    """
    info = folder / "hooks_of_tests-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hooks-of-tests\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(textwrap.dedent(points))
    paths = [str(folder), *map(str, sources)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*paths, *sys.path])
        inherited = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [*paths, inherited])))
        yield


ALL = """\
[baton.attention]
quest = baton_quest:make
breaks = breaking_hooks:fails
breaks-and-leaves = breaking_hooks:leaves
quiet = breaking_hooks:quiet
on-rank-1 = breaking_hooks:on_rank_1
slow-at-first = breaking_hooks:slow_at_first
both = breaking_hooks:both
wrong = wrong_hooks:wrong
late = wrong_hooks:late

[baton.hooks]
steps = breaking_hooks:of_steps
bad = breaking_hooks:nonsense
counting = wrong_hooks:counting
refusing = wrong_hooks:refusing
boundless = wrong_hooks:boundless
nothing = wrong_hooks:no_hook
"""


@pytest.fixture(name="installed_hooks", scope="module", autouse=True)
def fixture_of_installed_hooks(tmp_path_factory):
    """All hooks of tests, and Quest, are installed."""
    with installed(tmp_path_factory.mktemp("installed"), ALL, QUEST):
        yield


@pytest.fixture(name="path", scope="module")
def fixture_of_path(tmp_path_factory):
    """A tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("hooks") / "model")


@pytest.fixture(name="want", scope="module")
def fixture_of_want(path):
    """What the model says to either prompt without hooks."""
    with running(path) as engine:
        runs = [submit(engine, prompt, 12, ignore_eos=True) for prompt in (PROMPT, NEIGHBOUR)]
        finish(*runs)
    return [run.tokens for run in runs]


def check_rank_1(engine: Engine, points: Sequence[str]) -> None:
    """The hook `on-rank-1` raises at each of these points on one of two ranks. That fails the
    request that has named it, on both, and nobody else."""
    name, count = "on-rank-1", 12
    options = {"sampling": SamplingParams(temperature=0.0, top_logprobs=2), "ignore_eos": True}
    want = submit(engine, NEIGHBOUR, count, **options)
    finish(want)
    same = 0
    for point in ("", *points):
        with held(engine):  # Both are there before the first step.
            beside = submit(engine, NEIGHBOUR, count, **options)
            mine = submit(engine, PROMPT, count, extensions={name: point.encode()}, **options)
        assert mine.done.wait(60)
        finish(beside)
        same += agreeing(beside, want)
        if point:
            assert mine.failed is not None, point
            assert (mine.failed.reason, mine.failed.hook) == (FailureReason.HOOK, name), point
        else:
            assert mine.failed is None
            assert len(mine.tokens[0]) == count
            assert not engine.load().hook_failures
    assert same > count * (1 + len(points)) // 2
    failures = engine.load().hook_failures
    assert set(failures) == {(name, "another rank")}
    assert failures[name, "another rank"] >= len(points)
    again = submit(engine, NEIGHBOUR, count, **options)
    finish(again)
    assert again.tokens == want.tokens
    assert engine.lost == ""


def agreeing(got: Run, want: Run) -> int:
    """Tokens up to the first that differs, which rounding must have decided."""
    pairs = zip(got.tokens[0], want.tokens[0], strict=True)
    for at, (one, other) in enumerate(pairs):
        if one != other:
            best, second = want.records[0][at].top_logprobs[:2]
            assert best - second < CLOSE, at
            return at
    return len(got.tokens[0])
