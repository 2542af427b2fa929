"""Runs with faults, seven of them in `make test` and twenty in `make test-slow`, and an accident at
each named moment of a hand-off; `make chaos RUNS=500 SEED=...` makes more of the former."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from chaos import plan
from chaos.harness import Harness, harness, run_many
from chaos.plan import (
    GROUPED,
    RANKS,
    RUNS_PER_CLUSTER,
    Fault,
    FaultKind,
    Topology,
    below,
    of_model,
    plan_below,
    plan_fetch_moment,
    plan_moment,
    plan_of_rank,
    plan_rolling,
    plan_run,
    topology_of,
)
from faults.failpoints import POINTS

SEED = 3
QUICK_RUNS, MORE_RUNS = range(7), range(7, 20)
MOMENTS = {
    "before the grant": ("decode-0", "decode.before_grant", 1, 1013, 1009),
    "after the grant": ("decode-0", "decode.after_grant", 1, 1003, 1000),
    "mid-chunk": ("prefill-0", "prefill.chunk", 2, 1018, 1019),
    "after the last write before its notification": (
        "prefill-0", "transfer.last_pushed", 1, 1015, 1012,
    ),
    "after the notification": ("prefill-0", "transfer.done", 1, 1001, 1016),
    "mid-decode": ("decode-0", "decode.tokens", 20, 1007, 1017),
}  # fmt: skip
"""Worker, failpoint, at which hit; the runs whose requests are there when it is killed or stopped.
No prompt comes twice: of what a decode worker holds already nothing is handed off."""

FETCH_MOMENTS = {
    "before the pages are expected": ("prefill-0", "fetch.wanted", 1),
    "the fetch is in the outbox": ("prefill-0", "fetch.asked", 1),
    "the fetch was written": ("prefill-0", "worker.wrote~fetch", 1),
    "it has ended, and the engine does not know": ("prefill-0", "fetch.landed", 1),
    "the fetch came": ("decode-0", "fetch.received", 1),
    "pages are held": ("decode-0", "fetch.held", 1),
    "before the last push": ("decode-0", "transfer.before_last_push", 1),
    "the last push is posted": ("decode-0", "transfer.last_pushed", 1),
    "the last notification is sent": ("decode-0", "transfer.done", 1),
    "all is sent, and still held": ("decode-0", "fetch.sent", 1),
    "at the router": ("router", "router.received~fetch", 1),
}
"""Of a fetch. Here a decode worker sends pages of fetches alone."""
QUICK_FETCH_MOMENTS = (
    ("it has ended, and the engine does not know", "kill"),
    ("the last push is posted", "kill"),
)
FETCH_RUN = 1042
"""Each moment has runs of its own, so that no worker has their pages yet."""
ATTEMPTS = 6
"""Runs of other requests, until one comes to the moment: on a busy machine all prompts of a run may
be computed by the other worker."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with harness(workspace=tmp_path_factory.mktemp("chaos")) as made:
        yield made


def test_a_seed_makes_the_same_run_every_time() -> None:
    assert plan_run(7, 3) == plan_run(7, 3)
    assert plan_run(7, 3) != plan_run(7, 4)
    assert plan_run(7, 3) != plan_run(8, 3)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "runs", [QUICK_RUNS, pytest.param(MORE_RUNS, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_no_fault_makes_an_answer_wrong_or_leaves_anything_behind(
    made: Harness, runs: range
) -> None:
    before = made.figures.runs
    outcomes = run_many(made, SEED, runs, print, math.inf)
    made.close_cluster()
    failed = [outcome.report() for outcome in outcomes if not outcome.is_good]
    assert not failed, "\n".join(failed)
    figures = made.figures
    assert figures.runs - before == len(runs)
    assert figures.tokens_compared > 50 * len(runs)
    assert figures.faults.total() >= len(runs) // 2, "hardly anything went wrong"
    assert figures.detected_s.get("killed"), "nobody was seen to die"


@pytest.mark.parametrize(
    "ending", ["kill", pytest.param("stop", marks=pytest.mark.slow, id="stop and wake")]
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_accident_at_a_named_moment_costs_nobody_an_answer(
    made: Harness, moment: str, ending: str
) -> None:
    target, failpoint, nth, killed_in, stopped_in = MOMENTS[moment]
    number = killed_in if ending == "kill" else stopped_in
    for other in range(ATTEMPTS):
        fault = f"{failpoint}={ending}@{nth}"
        outcome = made.run(plan_moment(SEED, number + 100 * other, target, fault))
        assert outcome.is_good, outcome.report()
        if outcome.blows:
            break
    assert [blow.name for blow in outcome.blows] == [target]
    assert all(history.ended_ok for history in outcome.histories)


@pytest.mark.slow
@pytest.mark.parametrize("number", [1000, 1001, 1002])
def test_what_an_operator_does_costs_nobody_an_answer(made: Harness, number: int) -> None:
    """Each worker in turn is drained and started again, and has the other role for a moment."""
    outcome = made.run(plan_rolling(SEED, number))
    assert outcome.is_good, outcome.report()
    assert all(history.ended_ok for history in outcome.histories)
    assert {blow.name for blow in outcome.blows} == set(outcome.plan.topology.workers)
    assert made._arena is not None
    changes = made._arena.cluster.metric("baton_role_changes_total", cause="operator")
    assert changes >= 2 * len(outcome.plan.topology.workers)


STATE_MOMENTS = {
    **MOMENTS,
    "a row in flight of a sequence that ended": ("decode-0", "decode.ended", 2, 1021, 1022),
}
"""Stopped there, the worker that wakes has a step in flight that writes a state, whose page others
may be granted."""


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ending", ["kill", "stop"])
@pytest.mark.parametrize("moment", STATE_MOMENTS)
def test_an_accident_at_a_named_moment_makes_no_state_wrong(
    made: Harness, moment: str, ending: str
) -> None:
    target, failpoint, nth, killed_in, stopped_in = STATE_MOMENTS[moment]
    number = killed_in if ending == "kill" else stopped_in
    for other in range(ATTEMPTS):
        plan = plan_moment(SEED, number + 100 * other, target, f"{failpoint}={ending}@{nth}")
        outcome = made.run(of_model(plan, "hybrid"))
        assert outcome.is_good, outcome.report()
        if outcome.blows:
            break
    assert [blow.name for blow in outcome.blows] == [target]
    assert all(history.ended_ok for history in outcome.histories)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["hybrid", "windows", "windows alone"])
def test_faults_make_no_answer_of_a_model_of_groups_wrong(made: Harness, model: str) -> None:
    """Workers fetch pages of all groups from each other, and do both legs."""
    fetching = Topology(2, 2, model=model, fetching="any")
    for topology in (fetching, Topology(0, 0, 2, model=model)):
        for number in range(4):
            outcome = made.run(plan_run(SEED + 1, number, topology))
            assert outcome.is_good, outcome.report()


@pytest.mark.parametrize(
    ("moment", "ending"),
    [
        pytest.param(
            moment,
            ending,
            marks=() if (moment, ending) in QUICK_FETCH_MOMENTS else pytest.mark.matrix,
        )
        for moment in FETCH_MOMENTS
        for ending in ("kill", "stop")
    ],
)
def test_an_accident_at_a_moment_of_a_fetch_costs_nobody_an_answer(
    made: Harness, moment: str, ending: str
) -> None:
    """The router has a policy that lets prompts be fetched from anybody, right or wrong."""
    target, failpoint, nth = FETCH_MOMENTS[moment]
    name, tilde, key = failpoint.partition("~")
    first = FETCH_RUN + 100 * (2 * list(FETCH_MOMENTS).index(moment) + (ending == "stop"))
    for other in range(ATTEMPTS):
        fault = f"{name}={ending}{tilde}{key}@{nth}"
        outcome = made.run(plan_fetch_moment(SEED, first + other, target, fault))
        assert outcome.is_good, outcome.report()
        if outcome.blows:
            break
    assert [blow.name for blow in outcome.blows] == [target]
    if target != "router":
        assert all(history.ended_ok for history in outcome.histories)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lasts_s", [0.0, 4.5], ids=["kill", "stop and wake"])
@pytest.mark.parametrize("target", ["prefill-0", "decode-0"])
def test_a_rank_dies_or_stands_still(made: Harness, target: str, lasts_s: float) -> None:
    kind: FaultKind = "freeze_rank" if lasts_s else "kill_rank"
    fault = Fault(kind, 0.4, target, lasts_s=lasts_s, restart_after_s=0.2)
    outcome = made.run(plan_of_rank(SEED, 1100, fault))
    assert outcome.is_good, outcome.report()
    assert [blow.name for blow in outcome.blows] == [target]
    assert all(history.ended_ok for history in outcome.histories)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lasts_s", [0.0, 4.5], ids=["kill", "stop and wake"])
@pytest.mark.parametrize("target", ["prefill-0", "decode-1"])
def test_a_group_ends_with_a_worker_of_it_and_comes_back(
    made: Harness, target: str, lasts_s: float
) -> None:
    """Another worker goes on with the requests of both."""
    role = target.partition("-")[0]
    topology = next(each for each in GROUPED if each.groups == (role,))
    kind: FaultKind = "freeze" if lasts_s else "kill"
    fault = Fault(kind, 0.4, target, lasts_s=lasts_s, restart_after_s=0.2)
    plan = replace(plan_moment(SEED, 1150, target, ""), faults=(fault,))
    outcome = made.run(of_model(replace(plan, topology=topology), "experts"))
    assert outcome.is_good, outcome.report()
    assert {blow.name for blow in outcome.blows} == set(topology.group_of(target))
    assert all(history.ended_ok for history in outcome.histories)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("topology", GROUPED, ids=lambda own: " ".join(own.groups))
def test_faults_make_no_answer_of_an_expert_group_wrong(made: Harness, topology: Topology) -> None:
    """Beside workers of several ranks or stages, too."""
    for number in range(4):
        plan = plan_run(SEED + 2, number, replace(topology, model="experts", fetching="any"))
        outcome = made.run(plan)
        assert outcome.is_good, outcome.report()


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ending", ["kill", "raise", "sleep:0.5"])
@pytest.mark.parametrize(
    ("point", "target"),
    [
        ("store.lookup", "both-0"),
        ("store.store", "both-0"),
        ("rank.copy", "both-0"),
        ("rank.step", "both-0"),
        ("rank.push", "prefill-0"),
        ("rank.asked", "decode-0"),
    ],
)
def test_an_accident_below_a_worker_of_two_ranks_costs_nobody_an_answer(
    made: Harness, point: str, target: str, ending: str
) -> None:
    """In another rank, or in the process of a store. Pages go to host memory and to a disk. The
    places of a store's loads are struck in `test_tiers_stores`: here prompts seldom come to them.
    """
    fault = Fault("below", 0, target, below(point, ending, 1), restart_after_s=0.2)
    for other in range(ATTEMPTS):
        before = made.figures.fired[point]
        outcome = made.run(plan_below(SEED, 1120 + other, fault))
        assert outcome.is_good, outcome.report()
        assert all(history.ended_ok for history in outcome.histories)
        if made.figures.fired[point] > before:
            return
    pytest.fail("no run came to that place")


def test_every_failpoint_is_struck() -> None:
    """A rank that dies or hangs before it is ready is no fault of a running cluster: `test_ranks`
    has it."""
    tree = ast.parse(Path(plan.__file__).read_text())
    texts = [one.value for one in ast.walk(tree) if isinstance(one, ast.Constant)]
    planned = {re.split("[=~]", text)[0] for text in texts if isinstance(text, str)}
    assert POINTS.keys() - planned == {"rank.load", "rank.join", "rank.joined"}


def test_expert_groups_have_their_share_of_the_runs() -> None:
    shapes = [topology_of(SEED, RUNS_PER_CLUSTER * block) for block in range(60)]
    grouped = [shape for shape in shapes if shape.groups]
    assert len(grouped) >= 5
    assert {(shape.groups, shape.ranks) for shape in grouped} == {
        (shape.groups, shape.ranks) for shape in GROUPED
    }
    assert all(shape.model == "experts" for shape in grouped)
    every = (
        topology_of(seed, RUNS_PER_CLUSTER * block) for seed in range(20) for block in range(60)
    )
    assert not any(shape.stages and shape.tiers for shape in every), "stages have no tiers"


def test_workers_of_several_ranks_have_their_share_of_the_runs() -> None:
    plans = [plan_run(SEED, number) for number in range(800)]
    kinds = Counter(fault.kind for plan in plans for fault in plan.faults)
    assert min(kinds["kill_rank"], kinds["freeze_rank"], kinds["below"]) >= 5
    assert {plan.topology.ranks for plan in plans} == {(1, 1), *RANKS}
    staged = [plan for plan in plans if plan.topology.stages]
    assert len(staged) >= 40
    assert any(
        fault.kind in ("kill_rank", "freeze_rank") for plan in staged for fault in plan.faults
    )
