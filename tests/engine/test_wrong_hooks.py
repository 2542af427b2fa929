"""Hooks that return what they must not: their neighbours never notice, and pages stay exact."""

from __future__ import annotations

import time

import pytest
from engine_kit import check_baseline, finish, held, running, submit
from hooks_kit import (  # The fixtures are used by their names.
    NEIGHBOUR,
    PROMPT,
    fixture_of_installed_hooks,  # noqa: F401
    fixture_of_path,  # noqa: F401
    fixture_of_want,  # noqa: F401
)
from wrong_hooks import TAGS

from engine.types import FailureReason

PAGE = 16
ROWS = (
    "a pair",
    "rows beyond",
    "prompt rows",
    "neighbours",
    "twice",
    "no pages",
    "too many pages",
    "fewer counts",
)
WANTED = ("no tensor", "fractions", "below", "above")
AT = {
    **dict.fromkeys([*TAGS, "leaves the process at once"], "request_began"),
    **dict.fromkeys(ROWS, "rows_narrowed"),
    **dict.fromkeys(WANTED, "pages_wanted"),
    "leaves the process": "step_began",
}


def hook_of(engine, index: int = 0):
    """The hook on the step loop's thread."""
    return engine._loop._scheduler.hooks._callers[index].hook


@pytest.mark.parametrize("how", AT)
def test_what_a_hook_must_not_return_is_a_failure_of_it_alone(path, want, how):
    with running(path, hooks=(f"wrong?how={how}",)) as engine:
        with held(engine):  # Both are in the same steps.
            neighbour = submit(engine, NEIGHBOUR, 12, ignore_eos=True)
            mine = submit(engine, PROMPT, 12, ignore_eos=True, extensions={"wrong": b""})
        finish(neighbour, mine)
        assert neighbour.tokens == want[1]
        assert engine.load().hook_failures["wrong", AT[how]] >= 1
        if how not in ("below", "above"):  # The step's end tells of these.
            assert mine.tokens == want[0]


def test_what_a_hook_that_chooses_pages_has_touched_is_never_keyed(path):
    """Its tag does not say from where on KV is not exact. So nothing decoded is."""
    with running(path, hooks=("wrong?how=well",)) as engine:
        cached: list = []
        engine.subscribe(cached.append)
        finish(submit(engine, PROMPT, 60, ignore_eos=True, extensions={"wrong": b""}))
        check_baseline(engine)
        assert not engine.load().hook_failures
        stored = sum(event.kind.value == "stored" for event in cached)
        assert stored == len(PROMPT) // PAGE


@pytest.mark.parametrize("then", ["fail", "leave"])
def test_a_hook_that_breaks_late_ends_or_leaves_all_choices(path, want, then):
    """The next step is in flight by then. The pool is too small for all, so some are preempted."""
    with running(path, hooks=(f"late?then={then}",), num_pages=22) as engine:
        with held(engine):
            neighbour = submit(engine, NEIGHBOUR, 12, ignore_eos=True)
            mine = [
                submit(engine, PROMPT, 60, choices=2, ignore_eos=True, extensions={"late": b""})
                for _ in range(2)
            ]
        finish(neighbour)
        assert neighbour.tokens == want[1]
        for run in mine:
            assert run.done.wait(60)
            if then == "leave":
                assert run.failed is None
                assert [each[:12] for each in run.tokens] == want[0] * 2
                assert engine.load().preemptions
        assert [run.failed.reason for run in mine if run.failed][:1] == [FailureReason.HOOK] * (
            then == "fail"
        )
        assert engine.load().hook_failures["late", "pages_wanted"] >= 1


def test_a_request_ends_when_no_step_has_a_row_of_it(path):
    """A sequence that ended has one more row in the step in flight."""
    with running(path, hooks=("counting",)) as engine:
        hook = hook_of(engine)
        runs = [submit(engine, PROMPT, 12, ignore_eos=True) for _ in range(2)]
        finish(*runs)
        for at in range(2, 6):
            stopping = submit(
                engine, PROMPT, 12, ignore_eos=True, token_ids=frozenset({runs[0].tokens[0][at]})
            )
            finish(stopping)
        long = submit(engine, NEIGHBOUR, 500, ignore_eos=True)
        while not long.tokens[0]:
            time.sleep(0.01)
        engine.cancel(long.request.id)
        check_baseline(engine)
        assert not engine.load().hook_failures
        assert sorted(hook.ended) == sorted(hook.began)


def test_a_hook_hears_of_the_end_of_a_request_that_another_refuses(path):
    with running(path, hooks=("counting", "refusing")) as engine:
        hook = hook_of(engine)
        refused = submit(engine, PROMPT, 12, extensions={"refusing": b""})
        assert refused.done.wait(60)
        assert refused.failed
        assert hook.ended == [refused.request.id]


def test_a_hook_hears_nothing_of_a_request_whose_adapter_is_not_here(path):
    with running(path, hooks=("counting",)) as engine:
        refused = submit(engine, PROMPT, 12, adapter=b"a" * 32)
        assert refused.done.wait(60)
        assert refused.failed.reason is FailureReason.ADAPTER
        assert not hook_of(engine).began


def test_a_hook_hears_of_the_end_of_a_request_that_it_has_left(path):
    with running(path, hooks=("wrong?how=leaves the process",)) as engine:
        mine = submit(engine, PROMPT, 12, extensions={"wrong": b""})
        finish(mine)
        check_baseline(engine)
        assert hook_of(engine).ended == [mine.request.id]
