"""The router's side of the pages of workers, over messages of real streams' kinds."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from frontdoor_kit import ScriptedDispatcher, open_door, plays, served_model
from scripted_worker import job
from waiting import until

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from prefixes.index import HOST, POOL, Held
from prefixes.keys import page_keys, prompt_short_keys
from router.jobs import Demand
from router.requests import tokenization
from router.requests.tokenization import Tokenizers
from router.workers.holdings import WorkerPages
from worker_base.outbox import Outbox
from worker_base.page_reports import PageReports


class Told:
    """An engine's part: what it tells, once a router has asked."""

    tell: Any = None

    def __call__(self, tell: Any) -> None:
        assert self.tell is None, "asked twice"
        self.tell = tell


class Link:
    """A worker with its stream to a router: messages go through bytes."""

    def __init__(self, name: str, *, fingerprint: str = "f", revision: str = "r") -> None:
        self.worker_id = name
        self.told = Told()
        self.reports = PageReports(self.told)
        self.outbox = Outbox(lambda: pytest.fail("overflow"))
        model = worker_pb2.ModelInfo(fingerprint=fingerprint, revision=revision, prefix_cache=True)
        self.identity = worker_pb2.WorkerIdentity(worker_id=name, model=model)
        self.asked: list[worker_pb2.PagesWanted] = []

    class _Estimate:
        load = worker_pb2.Load()

    estimate = _Estimate()

    def send(self, message: worker_pb2.WorkRequest) -> None:
        self.asked.append(message.pages_wanted)
        self.reports.wanted(message.pages_wanted, self.outbox)

    async def tell(self, pages: WorkerPages, *, losing: int = 0) -> None:
        """A turn of the worker, and all its messages but the first few."""
        self.reports.turn()
        while len(self.outbox):
            message = await self.outbox.get()
            if (losing := losing - 1) < 0:
                said = worker_pb2.WorkResponse.FromString(message.SerializeToString())
                pages.received(self, said)


def keys_of(count: int, salt: int = 0) -> list[bytes]:
    return [bytes((salt, number)) * 16 for number in range(count)]


def demand(**options: Any) -> Demand:
    return Demand.of(job(**options))


async def test_who_holds_a_prompt_is_known_by_revision_and_forgotten_with_the_stream() -> None:
    pages = WorkerPages()
    links = [Link("a"), Link("b"), Link("c", fingerprint="g", revision="other")]
    for link in links:
        pages.attached(link)
        link.told.tell(POOL, keys_of(5))
        await link.tell(pages)
    links[1].told.tell(HOST, keys_of(9))
    await links[1].tell(pages)
    asked = demand(keys=np.frombuffer(b"".join(key[:8] for key in keys_of(12)), np.uint64))
    assert pages.held(asked) == {"a": Held.all(5, 5), "b": Held.all(5, 9)}
    assert pages.load().keys["b", "host"] == 9
    for link in links:
        pages.lost(link)
    assert pages.held(asked) == {}
    await until(lambda: not pages._families)


async def test_a_lost_message_is_asked_for_again_and_the_index_is_kept() -> None:
    pages, link = WorkerPages(), Link("a")
    pages.attached(link)
    link.told.tell(POOL, keys_of(5))
    await link.tell(pages)
    link.told.tell(POOL, keys_of(3, salt=1))
    await link.tell(pages, losing=1)
    link.estimate.load.page_sequence = link.reports.sequence
    pages.loaded(link)
    assert pages.load().behind == {"a": 3}
    link.told.tell(POOL, keys_of(1, salt=2))
    await link.tell(pages)
    assert len(link.asked) == 2
    assert link.asked[1].next_sequence > 0
    assert pages.load().keys["a", "pool"] == 5
    await link.tell(pages)
    link.estimate.load.page_sequence = link.reports.sequence
    pages.loaded(link)
    load = pages.load()
    assert (load.keys["a", "pool"], load.behind, load.dropped) == (9, {"a": 0}, {"unordered": 1})
    assert load.asked == {"unordered": 1}


async def test_a_worker_that_keeps_no_pages_is_not_asked() -> None:
    pages, link = WorkerPages(), Link("a")
    link.identity.model.prefix_cache = False
    pages.attached(link)
    await link.tell(pages)
    assert link.asked == []
    assert link.told.tell is None, "the engine was made to tell"


@pytest.mark.parametrize(
    ("prompt_tokens", "callbacks"),
    [(300, 1), (4096, 1), (4098, 2), (8193, 2), (8194, 3), (20_000, None)],
)
async def test_keys_of_a_job_are_those_of_its_worker_and_hold_the_loop_up_for_a_moment(
    prompt_tokens: int, callbacks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: a thread makes them. A callback makes those of 4,096 tokens at most."""
    made_on: list[str] = []
    made_in = 0

    def counted(*shape: Any) -> Any:
        nonlocal made_in
        made_in += 1
        return page_keys(*shape)

    def watched(*shape: Any) -> Any:
        made_on.append(threading.current_thread().name)
        return prompt_short_keys(*shape)

    monkeypatch.setattr(tokenization, "prompt_short_keys", watched)
    monkeypatch.setattr(tokenization, "page_keys", counted)
    one = job(prompt_tokens=prompt_tokens, cache_salt=b"acme")
    one = replace(one, model=replace(one.model, prefix_cache=True, kv_precision="fp8"))
    tokenizers = Tokenizers()
    try:
        seen: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: seen.append(made_in))
        keys = await tokenizers.page_keys(one)
        assert len(keys) == (prompt_tokens - 1) // one.model.page_size_tokens
        want = prompt_short_keys(one.prompt_ids.astype(np.int32), 16, "fp8", b"acme")
        assert (keys == want).all()
        if callbacks is None:
            assert "baton-tokenize" in made_on[0]
        else:
            assert not made_on
            assert made_in == callbacks
            assert seen == ([1] if callbacks > 1 else []), "nothing else ran in between"
        for no_use in (replace(one, prompt_logprobs=True), job(prompt_tokens=prompt_tokens)):
            assert len(await tokenizers.page_keys(no_use)) == 0
    finally:
        tokenizers.close()
    await asyncio.sleep(0)


async def test_only_prompts_that_fit_the_context_are_hashed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hashed: list[int] = []

    def watched(ids: Any, *shape: Any) -> Any:
        hashed.append(len(ids))
        return page_keys(ids, *shape)

    monkeypatch.setattr(tokenization, "page_keys", watched)
    model = replace(served_model(tmp_path), prefix_cache=True)
    dispatcher = ScriptedDispatcher([model], plays([70]))
    async with open_door(dispatcher) as door:
        for count in (10_000, 40):
            given = api.GenerationInput(token_ids=api.TokenIds(ids=[7] * count))
            given.output.omit_text = True
            asked = door.stub.Generate(api.GenerateRequest(input=given))
            if count > model.max_context_tokens:
                with pytest.raises(grpc.aio.AioRpcError, match="context"):
                    await asked
            else:
                await asked
    assert hashed == [39], "the last one is computed"
    assert len(dispatcher.jobs[0].keys) == 39 // model.page_size_tokens
    assert (Demand.of(dispatcher.jobs[0]).keys == dispatcher.jobs[0].keys).all()
