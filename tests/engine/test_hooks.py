"""Hooks: what they are called for, and what becomes of requests when they break."""

from __future__ import annotations

import pytest
from breaking_hooks import POINTS
from engine_kit import build, check_baseline, finish, running, submit
from hooks_kit import (  # The fixtures are used by their names.
    NEIGHBOUR,
    PROMPT,
    check_rank_1,
    fixture_of_installed_hooks,  # noqa: F401
    fixture_of_path,  # noqa: F401
    fixture_of_want,  # noqa: F401
)

from engine.config import EngineConfig
from engine.engine import Engine, EngineError
from engine.types import FailureReason

LOOP = ("request_began", "request_ended")
QUICK = {
    *(("breaks", at) for at in ("request_began", "step_began", "attention_began")),
    *(("breaks-and-leaves", at) for at in ("request_ended", "pages_wanted", "step_ended")),
}


def end(run) -> None:
    assert run.done.wait(60)


@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param(name, at, marks=() if (name, at) in QUICK else pytest.mark.matrix)
        for name in ("breaks", "breaks-and-leaves")
        for at in POINTS
    ],
)
def test_a_hook_that_raises_harms_its_own_requests_alone(path, want, name, at):
    with running(path, hooks=(f"{name}?at={at}",)) as engine:
        neighbour = submit(engine, NEIGHBOUR, 12)
        mine = submit(engine, PROMPT, 12, extensions={name: b""})
        end(mine)
        finish(neighbour)
        assert neighbour.tokens == want[1]
        if name == "breaks" and at != "request_ended":
            assert mine.failed.reason is FailureReason.HOOK
            assert mine.failed.hook == name
        else:
            assert mine.failed is None
            assert len(mine.tokens[0]) == 12
            if at not in ("request_ended", "attention_ended", "step_ended"):
                assert (
                    mine.tokens == want[0]
                )  # It has gone on without the hook from the first step.
        again = submit(engine, NEIGHBOUR, 12)
        finish(again)
        assert again.tokens == want[1]
        assert engine.load().hook_failures[name, at] >= 1


def test_a_hook_that_is_too_slow_is_named(path, want):
    with running(path, hooks=("breaks?at=step_began&how=sleep",), hook_limit_s=0.25) as engine:
        neighbour = submit(engine, NEIGHBOUR, 12)
        mine = submit(engine, PROMPT, 12, extensions={"breaks": b""})
        end(mine)
        finish(neighbour)
        assert (mine.failed.reason, mine.failed.hook) == (FailureReason.HOOK, "breaks")
        assert neighbour.tokens == want[1]


def test_what_a_hook_does_at_its_first_call_does_not_count(path):
    """It may compile. Where a graph may contain its calls, they are made before the first step. If
    that fails, the worker does not start."""
    with running(path, hooks=("slow-at-first",), hook_limit_s=0.08) as engine:
        finish(submit(engine, PROMPT, 12))
        assert not engine.load().hook_failures
    words = "slow-at-first cannot be used: choosing_began failed before the first step"
    with pytest.raises(EngineError, match=words):
        build(path, hooks=("slow-at-first?how=raise",))


def test_points_come_in_their_order_and_every_request_ends(path):
    with running(path, hooks=("breaks",)) as engine:
        executor = engine._loop._executor
        hook = executor.steps.hooks._callers[0].hook
        finish(submit(engine, PROMPT, 3, extensions={"breaks": b""}))
        check_baseline(engine)
        layer = ["attention_began", "attention_ended"]
        narrow = ["attention_began", "pages_wanted", "attention_ended"]
        steps = ["step_began", *layer * 2, "step_ended"]
        decode = ["rows_narrowed", "step_began", "choosing_began", *narrow * 2, "step_ended"]
        heard = [point for point in hook.heard if point not in LOOP]
        assert heard[: len(steps) + len(decode)] == [*steps, *decode]
        assert [point for point in hook.heard if point in LOOP] == list(LOOP)


def test_a_request_is_refused_for_bytes_that_mean_nothing(path):
    with running(path, hooks=("breaks",)) as engine:
        for extensions, hook in (({"breaks": b"nonsense"}, "breaks"), ({"other": b""}, "other")):
            run = submit(engine, PROMPT, 3, extensions=extensions)
            end(run)
            assert (run.failed.reason, run.failed.hook) == (FailureReason.EXTENSION, hook)


def test_two_hooks_and_one_that_breaks(path, want):
    with running(path, hooks=("steps", "quest?sparse_tokens=1024")) as engine:
        runs = [submit(engine, prompt, 12) for prompt in (PROMPT, NEIGHBOUR)]
        finish(*runs)
        assert [run.tokens for run in runs] == want
        assert set(engine.load().hook_failures) == {("steps", "step_began")}


@pytest.mark.parametrize(
    ("hooks", "words"),
    [
        (("absent",), "absent is not installed; there are .*quest"),
        (("bad",), "bad cannot be made: ZeroDivisionError"),
        (("nothing",), "nothing is installed as baton.hooks and is no Hook"),
        (("boundless",), "boundless cannot say what it takes beside a page: ZeroDivisionError"),
        (("quest", "quest"), "quest is named twice"),
        (("quest", "breaks"), "quest and breaks both choose pages"),
        (("quest?sparse_tokens=255",), "at least 256"),
        (("quest?colour=red",), "no option colour"),
        (("quest?sparse_tokens",), "quest cannot be made"),
        (("quest?sparse_tokens=256",), "at least 512 with pages of 128"),
    ],
)
def test_a_hook_that_cannot_be_used_is_refused(path, hooks, words):
    page = 128 if "128" in words else 16
    pages = 0 if "beside" in words else 40
    config = EngineConfig(model=str(path), hooks=hooks, num_pages=pages, page_size=page)
    with pytest.raises(EngineError, match=words):
        Engine.build(config)


def test_a_hook_that_both_ends_need_is_part_of_the_fingerprint(path):
    prints = []
    for hooks in ((), ("quest",), ("both",)):
        with running(path, hooks=hooks) as engine:
            prints.append(engine.model.fingerprint)
            assert engine.model.extensions == hooks
    assert prints[0] == prints[1] != prints[2]


def test_a_hook_that_raises_on_one_rank(path):
    """`test_cuda_quest.py` has the same on two GPUs."""
    with running(path, hooks=("on-rank-1",), tp=2) as engine:
        check_rank_1(engine, POINTS[2:])


@pytest.mark.matrix
def test_a_hook_that_cannot_be_attached_on_one_rank(path):
    with pytest.raises(EngineError, match="rank 1: hook on-rank-1 cannot be attached"):
        build(path, hooks=("on-rank-1?attaches=no",), tp=2)
