"""Adapters in the router: a name is resolved once, and work goes only where the content is."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from scripted_worker import (
    BOTH,
    DECODE,
    PREFILL,
    Cluster,
    ScriptedWorker,
    error_of,
    job,
    tokens_of,
    until,
    with_settings,
)

from baton.worker.v1 import worker_pb2
from console.adapters import command
from prefixes.keys import prompt_short_keys
from router.dispatch.merge import unpack_ids
from router.errors import RouterError
from router.workers import live_adapters
from router.workers.live_adapters import AdapterRefusedError

ONE, TWO = b"1" * 32, b"2" * 32
KEYS = prompt_short_keys(np.arange(64, dtype=np.uint32), 16, "float32", b"", ONE)


@pytest.fixture
def usual() -> dict[str, object]:
    return {"local_prefill": "never"}


async def has(cluster: Cluster, worker: ScriptedWorker, **named: bytes) -> None:
    """The worker has these adapters, and the router knows it."""
    worker.tell_adapters(named)
    await until(lambda: cluster.link(worker).adapters == named)


def called(cluster: Cluster) -> list[str]:
    return [model.called for model in cluster.dispatcher.models()]


def refusal(cluster: Cluster, name: str) -> RouterError:
    with pytest.raises(RouterError) as refused:
        cluster.dispatcher.model(name)
    return refused.value


async def test_an_adapter_goes_where_its_content_is(cluster: Cluster) -> None:
    """A pair needs it on both sides; the model alone runs anywhere."""
    first, second = await cluster.pair()
    other = await cluster.add("d1", DECODE)
    await has(cluster, first, law=ONE)
    assert called(cluster) == ["tiny"]
    assert refusal(cluster, "poems").reason == "MODEL_NOT_FOUND"
    await has(cluster, other, law=ONE)
    assert called(cluster) == ["tiny", "law"]
    model = cluster.dispatcher.model("law")
    assert (model.name, model.adapter, model.digest) == ("tiny", "law", ONE)
    for _ in range(3):
        reader = cluster.read(replace(job(), model=model))
        submit = await first.heard("submit")
        assert (submit.adapter, (await other.heard("submit")).adapter) == (ONE, ONE)
        await reader.leave()
    assert second.count("submit") == 0


async def test_of_two_contents_the_one_that_runs_is_chosen(cluster: Cluster) -> None:
    """As while a name is loaded anew, worker by worker."""
    prefill, decode = await cluster.pair()
    both = await cluster.add("b0", BOTH)
    await has(cluster, prefill, law=TWO)
    await has(cluster, decode, law=ONE)
    await has(cluster, both, law=ONE)
    assert cluster.dispatcher.model("law").digest == ONE
    await has(cluster, both, law=TWO)
    assert cluster.dispatcher.model("law").digest == TWO


async def test_a_models_name_comes_first_and_all_names_are_told(cluster: Cluster) -> None:
    worker = await cluster.add("b0", BOTH)
    await has(cluster, worker, tiny=ONE, law=TWO)
    assert cluster.dispatcher.model("tiny").digest == b""
    assert cluster.dispatcher.model("").called == "tiny"
    assert refusal(cluster, "x").metadata["served"] == "tiny, law"


async def test_unloaded_means_unknown_and_lost_means_expected(cluster: Cluster) -> None:
    worker = await cluster.add("b0", BOTH)
    await has(cluster, worker, law=ONE)
    await has(cluster, worker)
    assert refusal(cluster, "law").reason == "MODEL_NOT_FOUND"
    await has(cluster, worker, law=ONE)
    await cluster.add("b1", BOTH)
    await worker.stop()
    await until(lambda: len(cluster.registry.members) == 1)
    assert refusal(cluster, "law").reason == "NO_WORKERS"


async def test_a_job_that_waits_ends_when_its_adapter_goes(cluster: Cluster) -> None:
    worker = await cluster.add("b0", BOTH)
    await has(cluster, worker, law=ONE)
    worker.report(prefill_credit_tokens=0)
    await cluster.caught_up(worker)
    reader = cluster.read(replace(job(), model=cluster.dispatcher.model("law")))
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    await has(cluster, worker)
    error = await error_of(reader)
    assert (error.reason, error.metadata["model"]) == ("MODEL_NOT_FOUND", "law")


async def test_a_job_that_waits_gets_the_content_that_took_the_place(cluster: Cluster) -> None:
    """Also while one of the two workers has the new one and the other has not."""
    prefill, decode = await cluster.pair()
    for worker in (prefill, decode):
        await has(cluster, worker, law=ONE)
    prefill.report(prefill_credit_tokens=0)
    await cluster.caught_up(prefill)
    asked = replace(job(), model=cluster.dispatcher.model("law"), keys=KEYS)
    reader = cluster.read(asked)
    await until(lambda: cluster.dispatcher.queued_jobs == 1)
    await has(cluster, prefill, law=TWO)
    between = refusal(cluster, "law")
    assert (between.reason, between.retry_after_s) == ("MODEL_LOADING", 1.0)
    assert cluster.dispatcher.queued_jobs == 1
    await has(cluster, decode, law=TWO)
    prefill.report(prefill_credit_tokens=64)
    assert (await prefill.heard("submit")).adapter == TWO
    assert (await decode.heard("submit")).adapter == TWO
    await reader.leave()


async def test_what_arrives_with_an_older_content_gets_the_new_one(cluster: Cluster) -> None:
    """Its prompt was tokenized meanwhile."""
    worker = await cluster.add("b0", BOTH)
    await has(cluster, worker, law=ONE)
    asked = replace(job(), model=cluster.dispatcher.model("law"))
    await has(cluster, worker, law=TWO)
    reader = cluster.read(asked)
    assert (await worker.heard("submit")).adapter == TWO
    await reader.leave()


async def test_a_refusal_that_crosses_a_new_content_is_no_unknown_model(cluster: Cluster) -> None:
    """The worker replaced it, and the router's work for the old one came late: until the router
    has heard of the new one, the client is to try again."""
    worker = await cluster.add("b0", BOTH)
    await has(cluster, worker, law=ONE)
    reader = cluster.read(replace(job(), model=cluster.dispatcher.model("law")))
    first = (await worker.heard("submit")).attempt_id
    await has(cluster, worker, law=TWO)
    worker.failed(first, worker_pb2.FAILURE_REASON_ADAPTER)
    again = await worker.heard("submit")
    assert again.adapter == TWO
    attempt = again.attempt_id
    for left in reversed(range(cluster.settings.debug.max_retries)):
        worker.failed(attempt, worker_pb2.FAILURE_REASON_ADAPTER)
        if left:
            attempt = (await worker.heard("submit")).attempt_id
    error = await error_of(reader)
    assert (error.reason, "was replaced" in error.message) == ("MODEL_LOADING", True)


@pytest.mark.parametrize("is_kept", [True, False])
@with_settings(resume_grace_s=0.3)
async def test_a_stream_ends_with_the_content_with_which_it_began(
    cluster: Cluster, is_kept: bool
) -> None:
    """Its worker was lost after a name got another content: only who has the one of its tokens
    goes on, also under another name."""
    prefill, decode = await cluster.pair()
    other = await cluster.add("d1", DECODE)
    for worker in (prefill, decode):
        await has(cluster, worker, law=ONE)
    reader = cluster.read(replace(job(max_tokens=4), model=cluster.dispatcher.model("law")))
    attempt = (await prefill.heard("submit")).attempt_id
    await decode.heard("submit")
    prefill.first_token(attempt, 10)
    prefill.prefill_done(attempt)
    decode.delivered(attempt)
    decode.tokens(attempt, 0, 10, 11)
    await until(lambda: len(tokens_of(reader.events)) == 2)
    kept = {"old": ONE} if is_kept else {}
    for worker in (prefill, other):
        await has(cluster, worker, law=TWO, **kept)
    await decode.stop()
    for _ in range(cluster.settings.debug.max_retries + 1 if is_kept else 0):
        again = await prefill.heard("submit")
        assert (again.adapter, (await other.heard("submit")).adapter) == (ONE, ONE)
        assert [unpack_ids(tokens.token_ids) for tokens in again.generated] == [(10, 11)]
        other.failed(again.attempt_id, worker_pb2.FAILURE_REASON_ADAPTER)  # It was gone by then.
    error = await error_of(reader)
    assert error.reason == "WORKER_LOST_MID_STREAM"
    assert "no others have the adapter as it was" in error.message
    assert tokens_of(reader.events) == [10, 11]
    for worker in (prefill, other):
        assert worker.count("submit") == 0


async def test_a_name_that_half_a_pair_has_is_to_be_asked_for_again(cluster: Cluster) -> None:
    prefill, decode = await cluster.pair()
    await has(cluster, prefill, law=ONE)
    assert refusal(cluster, "law").reason == "MODEL_LOADING"
    await decode.stop()
    await until(lambda: len(cluster.registry.members) == 1)
    error = await error_of(cluster.read(replace(job(), model=cluster.dispatcher.model("law"))))
    assert error.reason == "NO_WORKERS"


async def test_a_worker_that_has_let_it_go_is_passed_by(cluster: Cluster) -> None:
    """Its word of that, and work for it, may cross."""
    one, two = await cluster.add("b0", BOTH), await cluster.add("b1", BOTH)
    for worker in (one, two):
        await has(cluster, worker, law=ONE)
    reader = cluster.read(replace(job(max_tokens=1), model=cluster.dispatcher.model("law")))
    await until(lambda: one.count("submit") + two.count("submit") == 1)
    first, second = (one, two) if one.count("submit") else (two, one)
    attempt = (await first.heard("submit")).attempt_id
    first.failed(attempt, worker_pb2.FAILURE_REASON_ADAPTER)
    attempt = (await second.heard("submit")).attempt_id
    second.first_token(attempt, 10)
    second.finished(attempt, 1)
    await reader.end()


async def test_keys_name_the_adapter() -> None:
    ids = np.arange(64, dtype=np.uint32)
    keys = {bytes(prompt_short_keys(ids, 16, "float32", b"", each)) for each in (b"", ONE, TWO)}
    assert len(keys) == 3


async def does(worker: ScriptedWorker, kind: str, digest: bytes = b"", error: str = "") -> str:
    """The worker does what it is asked, or says why not. Returns the adapter's name."""
    asked = await worker.heard(kind)
    if not error:
        worker.tell_adapters({asked.name: digest} if digest else {})
    done = worker_pb2.AdapterDone(call_id=asked.call_id, digest=digest, error=error)
    worker.say(adapter_done=done)
    return str(asked.name)


async def pair_with_adapters(cluster: Cluster) -> tuple[ScriptedWorker, ScriptedWorker]:
    prefill = await cluster.add("p0", PREFILL, adapters={})
    return prefill, await cluster.add("d0", DECODE, adapters={})


async def loaded(
    cluster: Cluster, *workers: ScriptedWorker, path: str = "v1", digest: bytes = ONE
) -> None:
    """All have loaded law."""
    load = asyncio.create_task(cluster.registry.adapters.load("law", path, again=True))
    for worker in workers:
        await does(worker, "load_adapter", digest)
    assert await load == digest


async def test_a_load_is_done_when_all_have_it_and_later_workers_get_it(cluster: Cluster) -> None:
    workers = await pair_with_adapters(cluster)
    live = cluster.registry.adapters
    load = asyncio.create_task(live.load("law", "v1"))
    assert [await does(worker, "load_adapter", ONE) for worker in workers] == ["law", "law"]
    assert await load == ONE
    assert called(cluster) == ["tiny", "law"]
    later = await cluster.add("d1", DECODE, adapters={})
    assert (await later.heard("load_adapter")).path == "v1"
    unload = asyncio.create_task(live.unload("law"))
    for worker in workers:
        await does(worker, "unload_adapter")
    await unload
    assert called(cluster) == ["tiny"]
    with pytest.raises(AdapterRefusedError, match="cannot be found"):
        await live.unload("law")
    last = await cluster.add("d2", DECODE, adapters={})
    await cluster.caught_up(last)
    assert last.count("load_adapter") == 0


@pytest.mark.parametrize(
    ("digest", "error", "told"),
    [(TWO, "", "different contents"), (b"", "r 128 is above", "d0: r 128 is above")],
)
async def test_a_load_that_one_cannot_do_is_undone(
    digest: bytes, error: str, told: str, cluster: Cluster
) -> None:
    prefill, decode = await pair_with_adapters(cluster)
    load = asyncio.create_task(cluster.registry.adapters.load("law", "v1"))
    await does(prefill, "load_adapter", ONE)
    await does(decode, "load_adapter", digest, error)
    for worker in (prefill, decode) if digest else (prefill,):
        assert await does(worker, "unload_adapter") == "law"
    with pytest.raises(AdapterRefusedError, match=told):
        await load
    assert called(cluster) == ["tiny"]


async def test_a_new_content_that_one_cannot_load_is_taken_back(cluster: Cluster) -> None:
    """The others get the folder back from which they had it."""
    prefill, decode = await pair_with_adapters(cluster)
    live = cluster.registry.adapters
    load = asyncio.create_task(live.load("law", "v1"))
    for worker in (prefill, decode):
        await does(worker, "load_adapter", ONE)
    await load
    load = asyncio.create_task(live.load("law", "v2", again=True))
    await does(prefill, "load_adapter", TWO)
    await does(decode, "load_adapter", error="its disk is full")
    back = await prefill.heard("load_adapter")
    assert (back.path, back.again) == ("v1", True)
    told = worker_pb2.Adapter(name="law", digest=ONE)
    prefill.say(adapters=worker_pb2.Adapters(adapters=[told]))
    prefill.say(adapter_done=worker_pb2.AdapterDone(call_id=back.call_id, digest=ONE))
    with pytest.raises(AdapterRefusedError, match=r"d0: its disk is full$"):
        await load
    assert cluster.dispatcher.model("law").digest == ONE


async def test_what_no_command_may_do(cluster: Cluster) -> None:
    live = cluster.registry.adapters
    with pytest.raises(AdapterRefusedError, match="takes adapters: none"):
        await live.load("law", "v1")
    await pair_with_adapters(cluster)
    with pytest.raises(AdapterRefusedError, match="is the name of a model"):
        await live.load("tiny", "v1")


async def test_what_another_router_unloads_or_replaces_is_followed(cluster: Cluster) -> None:
    """A worker that comes later gets nothing of it from this router. While some worker still has
    it, it is wanted."""
    for change in ({}, {"law": TWO}):
        workers = await pair_with_adapters(cluster)
        await loaded(cluster, *workers)
        await has(cluster, workers[0], **change)
        later = await cluster.add("d1", DECODE, adapters={})
        assert (await later.heard("load_adapter")).path == "v1"
        await later.stop()
        await has(cluster, workers[1], **change)
        last = await cluster.add("d2", DECODE, adapters={})
        await cluster.caught_up(last)
        assert last.count("load_adapter") == 0
        for worker in (*workers, last):
            await worker.stop()
        await until(lambda: not cluster.registry.members)


async def test_a_name_that_another_router_loads_again_stays(cluster: Cluster) -> None:
    """Though this one had unloaded it."""
    workers = await pair_with_adapters(cluster)
    await loaded(cluster, *workers)
    unload = asyncio.create_task(cluster.registry.adapters.unload("law"))
    for worker in workers:
        await does(worker, "unload_adapter")
    await unload
    await has(cluster, workers[0], law=TWO)
    later = await cluster.add("d1", DECODE, adapters={"law": TWO})
    await cluster.caught_up(later)
    assert later.count("unload_adapter") == 0


async def test_a_worker_that_was_away_gets_what_it_missed(cluster: Cluster) -> None:
    workers = await pair_with_adapters(cluster)
    await loaded(cluster, *workers)
    older = await cluster.add("d1", DECODE, adapters={"law": TWO, "poems": TWO})
    asked = await older.heard("load_adapter")
    assert (asked.path, asked.again) == ("v1", True)
    unload = asyncio.create_task(cluster.registry.adapters.unload("law"))
    for worker in (*workers, older):
        await does(worker, "unload_adapter")
    await unload
    back = await cluster.add("d2", DECODE, adapters={"law": ONE, "poems": TWO})
    assert (await back.heard("unload_adapter")).name == "law"
    await cluster.caught_up(back)
    assert back.count("unload_adapter") == 0


async def test_a_later_worker_that_reads_other_content_lets_it_go(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await loaded(cluster, *await pair_with_adapters(cluster))
    later = await cluster.add("d1", DECODE, adapters={})
    await does(later, "load_adapter", TWO)
    assert await does(later, "unload_adapter") == "law"
    assert "another content than was loaded here" in caplog.text


async def test_a_worker_that_comes_while_a_command_runs_misses_nothing(cluster: Cluster) -> None:
    workers = await pair_with_adapters(cluster)
    load = asyncio.create_task(cluster.registry.adapters.load("law", "v1"))
    call = await workers[0].heard("load_adapter")
    later = await cluster.add("d1", DECODE, adapters={})
    workers[0].tell_adapters({"law": ONE})
    workers[0].say(adapter_done=worker_pb2.AdapterDone(call_id=call.call_id, digest=ONE))
    await does(workers[1], "load_adapter", ONE)
    await load
    assert (await later.heard("load_adapter")).path == "v1"
    unload = asyncio.create_task(cluster.registry.adapters.unload("law"))
    await workers[0].heard("unload_adapter")
    last = await cluster.add("d2", DECODE, adapters={"law": ONE})
    await does(workers[1], "unload_adapter")
    await workers[0].stop()
    with pytest.raises(AdapterRefusedError, match="does not answer"):
        await unload
    assert (await last.heard("unload_adapter")).name == "law"


async def test_all_workers_have_one_time_together_and_a_late_one_lets_it_go(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_adapters, "ANSWER_S", 0.6)
    workers = [*await pair_with_adapters(cluster), await cluster.add("d1", DECODE, adapters={})]
    began_s = asyncio.get_running_loop().time()
    with pytest.raises(AdapterRefusedError, match=r"d0: it does not answer; d1: it does not"):
        await cluster.registry.adapters.load("law", "v1")
    assert asyncio.get_running_loop().time() - began_s < 2 * 0.6
    await does(workers[1], "load_adapter", ONE)
    assert await does(workers[1], "unload_adapter") == "law"
    assert command.ANSWER_S > 2 * 120.0


async def test_a_late_replacement_gives_way_to_what_is_wanted(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await pair_with_adapters(cluster)
    await loaded(cluster, prefill, decode)
    monkeypatch.setattr(live_adapters, "ANSWER_S", 0.3)
    load = asyncio.create_task(cluster.registry.adapters.load("law", "v2", again=True))
    await does(prefill, "load_adapter", error="its disk is full")
    with pytest.raises(AdapterRefusedError, match="d0: it does not answer"):
        await load
    await does(decode, "load_adapter", TWO)
    back = await decode.heard("load_adapter")
    assert (back.path, back.again) == ("v1", True)


@with_settings(split_names=("best=tiny:9+other:1",))
async def test_a_name_means_one_thing(cluster: Cluster) -> None:
    """It is no adapter of two models, and stands for no models."""
    live = cluster.registry.adapters
    prefill, decode = await pair_with_adapters(cluster)
    other = await cluster.add("o0", BOTH, model="other", adapters={"poems": TWO})
    with pytest.raises(AdapterRefusedError, match="one of --split-names"):
        await live.load("best", "v1", "tiny")
    with pytest.raises(AdapterRefusedError, match="'poems' is an adapter of other"):
        await live.load("poems", "v1", "tiny")
    load = asyncio.create_task(live.load("law", "v1", "tiny"))
    for worker in (prefill, decode):
        await does(worker, "load_adapter", ONE)
    await load
    with pytest.raises(AdapterRefusedError, match="'law' is an adapter of tiny"):
        await live.load("law", "v1", "other")
    assert other.count("load_adapter") == 0
