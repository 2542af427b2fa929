"""Roles that change: what a router sends meanwhile, who meets whom, and what it refuses."""

from __future__ import annotations

import pytest
from scripted_worker import BOTH, DECODE, PREFILL, Cluster, ScriptedWorker, job, until

from baton.worker.v1 import worker_pb2
from router.workers.life import ASKED_S, AskedRole
from router.workers.roles import RoleRefusedError, Roles


async def add(cluster: Cluster, worker_id: str, role: int) -> ScriptedWorker:
    """A flexible worker."""
    worker = await cluster.add(worker_id, role, flexible=True)
    worker.load.role = role
    return worker


async def test_a_worker_on_its_way_gets_no_new_work_and_ends_what_it_has(cluster: Cluster) -> None:
    prefill = await add(cluster, "p0", PREFILL)
    one, other = [await add(cluster, name, DECODE) for name in ("d0", "d1")]
    first = cluster.read(job(max_tokens=2))
    attempt = (await prefill.heard("submit")).attempt_id
    await until(lambda: one.count("submit") + other.count("submit") == 1)
    leaving, staying = (one, other) if one.count("submit") else (other, one)
    leaving.report(next_role=PREFILL)
    await until(lambda: cluster.link(leaving).draining)
    second = cluster.read(job(max_tokens=2))
    assert (await staying.heard("submit")).mode == worker_pb2.WORK_MODE_DECODE
    prefill.first_token(attempt, 10)
    leaving.tokens(attempt, 1, 11)
    leaving.finished(attempt, 2)
    prefill.prefill_done(attempt)
    await first.end()
    leaving.report(role=PREFILL, next_role=0)
    await until(lambda: cluster.link(leaving).prefills)
    link = cluster.link(leaving)
    assert (link.role, link.decodes, link.draining) == ("prefill", False, False)
    await second.leave()


async def test_flexible_workers_meet_whoever_they_may_work_with_later(cluster: Cluster) -> None:
    """A change then waits for no connection. Workers that never change do not meet their like."""
    flexible = await cluster.add("p0", PREFILL, flexible=True)
    fixed = await cluster.add("p1", PREFILL)
    await cluster.add("p2", PREFILL)
    for worker, peers in ((flexible, 2), (fixed, 1)):
        await until(lambda: worker.count("meet") == peers)


@pytest.mark.parametrize(
    ("worker", "role", "why"),
    [
        ("d0", PREFILL, "d0 stays decode: no other worker decodes for tiny"),
        ("p0", DECODE, "p0 stays prefill: it was started without --flexible"),
        ("p1", DECODE, ""),
        ("d0", BOTH, ""),
        ("p0", PREFILL, ""),
        ("p9", BOTH, "no worker 'p9' is attached; attached: d0, d1, d2, p0, p1"),
        ("d1", BOTH, "it is draining"),
    ],
)
async def test_what_is_refused(cluster: Cluster, worker: str, role: int, why: str) -> None:
    """A worker that drains, changes or serves another model is no other worker."""
    await cluster.add("p0", PREFILL)
    p1, d0, d1 = [
        await add(cluster, *one) for one in (("p1", PREFILL), ("d0", DECODE), ("d1", DECODE))
    ]
    await cluster.add("d2", DECODE, model="other")
    d1.report(draining=True)
    await until(lambda: cluster.link(d1).draining)
    roles = Roles(lambda: sorted(cluster.registry.members, key=lambda one: one.worker_id))
    if why:
        with pytest.raises(RoleRefusedError, match=why):
            roles.change(worker, role, "operator")
    else:
        roles.change(worker, role, "operator")
    told = {"p1": p1, "d0": d0}.get(worker)
    if told and not why:
        assert (await told.heard("set_role")).role == role


async def test_two_changes_at_once_leave_somebody_of_the_role(cluster: Cluster) -> None:
    """What was asked counts before the worker's report has it, and no more once it does."""
    one, other = [await add(cluster, name, PREFILL) for name in ("p0", "p1")]
    await add(cluster, "d0", DECODE)
    roles = Roles(lambda: cluster.registry.members)
    for worker in (one, other):
        worker.reports_by_itself = False
    link = roles.change("p0", DECODE, "operator")
    assert roles.change("p0", DECODE, "operator") is link
    with pytest.raises(RoleRefusedError, match="no other worker computes prompts of tiny"):
        roles.change("p1", DECODE, "operator")
    await one.heard("set_role")
    assert one.count("set_role") == 0
    one.report(role=DECODE)
    await until(lambda: link.decodes)
    assert not link.asked.role
    roles.change("p0", PREFILL, "operator")
    assert (await one.heard("set_role")).role == PREFILL
    assert other.count("set_role") == 0


def test_an_asked_role_that_no_report_shows_is_forgotten() -> None:
    now_s = [0.0]
    asked = AskedRole(lambda: now_s[0])
    asked.ask(DECODE, PREFILL)
    asked.reported(PREFILL)
    assert (asked.role, asked.former) == (DECODE, PREFILL)
    now_s[0] = ASKED_S
    assert (asked.role, asked.former) == (0, 0)


@pytest.mark.parametrize("is_over", [False, True])
async def test_of_two_routers_each_sends_the_last_of_a_role_back(
    cluster: Cluster, is_over: bool
) -> None:
    """Another router asked the other worker at the same time."""
    own, others = [await add(cluster, name, PREFILL) for name in ("p0", "p1")]
    await add(cluster, "d0", DECODE)
    Roles(lambda: cluster.registry.members).change("p0", DECODE, "operator")
    assert (await own.heard("set_role")).role == DECODE
    own.report(**({"role": DECODE} if is_over else {"next_role": DECODE}))
    await until(lambda: not cluster.link(own).asked.role)
    assert own.count("set_role") == 0
    others.report(next_role=DECODE)
    assert (await own.heard("set_role")).role == PREFILL
    assert others.count("set_role") == 0
