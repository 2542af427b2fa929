"""Several models on one router: each has its own workers, and no part in the others' troubles."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from scripted_worker import BOTH, DECODE, PREFILL, Cluster, ScriptedWorker, job, tokens_of, until

from baton.worker.v1 import worker_pb2
from router.errors import RouterError
from router.placement import models
from router.placement.models import MOST_NAMES, Models
from router.workers.link import Loss


@pytest.fixture
def usual() -> dict[str, object]:
    return {"max_queued_requests": 1}


async def add(cluster: Cluster, model: str, role: int = BOTH, **options: str) -> ScriptedWorker:
    name = f"{model}-{role}-{len(cluster.workers)}"
    return await cluster.add(name, role, model=model, fingerprint=model, **options)


def refusal(cluster: Cluster, name: str) -> RouterError:
    with pytest.raises(RouterError) as refused:
        cluster.dispatcher.model(name)
    return refused.value


def names(cluster: Cluster) -> list[str]:
    return [model.name for model in cluster.dispatcher.models()]


async def lose(cluster: Cluster, worker: ScriptedWorker) -> None:
    members = len(cluster.registry.members)
    await worker.stop()
    await until(lambda: len(cluster.registry.members) < members)


async def test_a_job_runs_on_workers_of_its_model(cluster: Cluster) -> None:
    workers = {name: await add(cluster, name) for name in ("one", "two")}
    for name, worker in workers.items():
        reader = cluster.read(job(model=name, max_tokens=1))
        attempt = (await worker.heard("submit")).attempt_id
        worker.first_token(attempt, 10)
        worker.finished(attempt, 1)
        assert tokens_of(await reader.end()) == [10]
    assert [worker.count("submit") for worker in workers.values()] == [0, 0]


async def test_no_pair_is_made_of_two_models(cluster: Cluster) -> None:
    await add(cluster, "one", PREFILL)
    await add(cluster, "two", DECODE)
    assert names(cluster) == ["two"]  # decode workers can do without others
    with pytest.raises(RouterError, match="NO_WORKERS"):
        await cluster.read(job(model="one")).end()


@pytest.mark.parametrize("decode_revision", ["r", "other"])
async def test_a_pair_that_differs_is_none_and_the_client_is_told(decode_revision: str) -> None:
    """Another page size, or other weights: by mistake, or while a fleet is upgraded."""
    cluster = Cluster(local_prefill="never")
    try:
        workers = [
            await cluster.add("p0", PREFILL, fingerprint="a"),
            await cluster.add("d0", DECODE, fingerprint="b", revision=decode_revision),
        ]
        with pytest.raises(RouterError, match=r"NO_WORKERS: .* differ in weights") as refused:
            await cluster.read(job()).end()
        assert refused.value.retry_after_s
        assert [worker.count("meet") + worker.count("submit") for worker in workers] == [0, 0]
    finally:
        await cluster.close()


async def test_the_empty_name_selects_the_only_model_that_runs(cluster: Cluster) -> None:
    await add(cluster, "one")
    await add(cluster, "half", PREFILL)
    assert names(cluster) == ["one"]
    assert cluster.dispatcher.model("").name == "one"
    await add(cluster, "two")
    error = refusal(cluster, "")
    assert (error.reason, error.metadata["served"]) == ("MODEL_NOT_FOUND", "half, one, two")


async def test_an_unknown_model_is_told_what_is_served(cluster: Cluster) -> None:
    await add(cluster, "one")
    error = refusal(cluster, "three")
    assert (error.reason, error.code.name) == ("MODEL_NOT_FOUND", "NOT_FOUND")
    assert error.message == "model 'three' is not served (served: one)"
    assert error.metadata == {"model": "three", "served": "one"}


async def test_a_model_that_lost_its_workers_is_expected_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients are to wait, as for any worker that restarts; not for ever."""
    gone, _ = await add(cluster, "one"), await add(cluster, "two")
    await lose(cluster, gone)
    assert names(cluster) == ["two"]
    assert refusal(cluster, "one").reason == "NO_WORKERS"
    assert refusal(cluster, "three").reason == "MODEL_NOT_FOUND"
    with monkeypatch.context() as patch:
        patch.setattr(models, "REMEMBERED_S", 0.0)
        assert refusal(cluster, "one").reason == "MODEL_NOT_FOUND"
    await add(cluster, "one")
    assert cluster.dispatcher.model("one").name == "one"


async def test_a_full_queue_is_full_for_its_model_only(cluster: Cluster) -> None:
    busy, free = await add(cluster, "busy"), await add(cluster, "free")
    link = next(one for one in cluster.registry.members if one.worker_id == busy.identity.worker_id)
    busy.report(prefill_credit_tokens=0)
    await until(lambda: not link.capacity().prefill_credit_tokens)
    waiting = cluster.read(job(model="busy"))
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    with pytest.raises(RouterError, match="QUEUE_FULL"):
        await cluster.read(job(model="busy")).end()
    reader = cluster.read(job(model="free", max_tokens=1))
    attempt = (await free.heard("submit")).attempt_id
    free.first_token(attempt, 10)
    free.finished(attempt, 1)
    assert tokens_of(await reader.end()) == [10]
    await waiting.leave()


async def test_a_job_keeps_to_the_revision_that_it_began_with(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """While a fleet is upgraded: new jobs go where most workers are, once those can run them."""
    old = await add(cluster, "one", revision="old")
    with caplog.at_level(logging.WARNING):
        new = [await add(cluster, "one", revision="new") for _ in range(2)]
    assert "differ in weights or settings" in caplog.text
    assert cluster.dispatcher.model("one").revision == "new"
    reader = cluster.read(job(model="one", revision="old", max_tokens=1))
    attempt = (await old.heard("submit")).attempt_id
    old.first_token(attempt, 10)
    old.finished(attempt, 1)
    assert tokens_of(await reader.end()) == [10]
    assert [worker.count("submit") for worker in new] == [0, 0]
    for worker in new:
        await lose(cluster, worker)
    assert cluster.dispatcher.model("one").revision == "old"
    with pytest.raises(RouterError, match="NO_WORKERS"):
        await cluster.read(job(model="one", revision="new")).end()


def test_of_names_without_workers_the_last_are_remembered() -> None:
    """Fleets that give each revision a name of its own would fill the memory with them."""
    known = Models([], "cached")
    for second in range(MOST_NAMES + 3):
        link = SimpleNamespace(
            identity=worker_pb2.WorkerIdentity(), left_in_order=lambda _: False, adapters={}
        )
        link.identity.model.name = f"m{second}"
        known.left(link, second, Loss.FROZEN)  # type: ignore[arg-type]
    assert len(known._left_s) == len(known._lost_s) == len(known._froze_s) == MOST_NAMES
    latest = float(MOST_NAMES + 2)
    assert known.is_expected_back(f"m{MOST_NAMES + 2}", latest, within_s=60)
    assert not known.is_expected_back("m2", latest, within_s=latest)
    assert known.is_expected_back("m3", latest, within_s=latest)
