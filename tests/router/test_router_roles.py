"""Roles that change: what a router sends meanwhile, who meets whom, and what it refuses."""

from __future__ import annotations

import pytest
from scripted_worker import BOTH, DECODE, PREFILL, Cluster, ScriptedWorker, job, until

from baton.worker.v1 import worker_pb2
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
