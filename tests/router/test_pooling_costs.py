"""What embeddings and scores may cost the router."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai_kit import Port, open_port, says

from baton.worker.v1 import worker_pb2
from router.doors.auth import TokenGate
from router.jobs import Job, JobEvent, JobFinished, JobPooled
from router.pooling import pooling

WIDTH = 4096
VECTOR = np.arange(WIDTH, dtype="<f4")


async def pools(job: Job) -> AsyncGenerator[JobEvent]:
    yield JobPooled(VECTOR.tobytes())
    yield JobFinished(cached_prompt_tokens=0)


def takes(port: Port, labels: int = 0) -> None:
    held = worker_pb2.PoolingDefaults(kind=worker_pb2.POOL_KIND_LAST, width=WIDTH, labels=labels)
    port.dispatcher.served = [replace(one, pooling=held) for one in port.dispatcher.served]


async def test_vectors_are_written_in_turns_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 of them held the loop for 1.3 s."""
    written = [0]
    step = pooling.in_turns

    async def watched(vectors: Iterable[Any], width: int) -> AsyncGenerator[Any]:
        async for one in step(vectors, width):
            written[-1] += 1
            yield one

    async def look() -> None:
        while True:
            written.append(0)
            await asyncio.sleep(0)

    for module in ("router.pooling.pooling", "router.doors.openai.pooling"):
        monkeypatch.setattr(f"{module}.in_turns", watched)
    async with open_port(tmp_path, pools) as port:
        takes(port)
        looking = asyncio.create_task(look())
        given = {"model": "tiny", "input": ["fox"] * 20}
        packed = await port.client.embeddings.create(**given, encoding_format="base64")
        plain = await port.client.embeddings.create(**given, encoding_format="float")
        body = {"text_1": "fox", "text_2": ["fox"] * 20}
        url = f"http://{port.server.address}/score"
        scored: Any = await port.client.post(url, body=body, cast_to=object)
        looking.cancel()
    assert sum(written) == 5 * 20
    assert [one["score"] for one in scored["data"]] == [pytest.approx(VECTOR @ VECTOR)] * 20
    assert max(written) <= 2, "one of the message, and one of its text"
    assert [one.embedding for one in plain.data] == [VECTOR.tolist()] * 20
    raw = [base64.b64decode(one.embedding) for one in packed.data]
    assert raw == [VECTOR.tobytes()] * 20


@pytest.mark.parametrize(("texts", "fits"), [(33, False), (32, True)])
async def test_a_long_query_is_not_read_for_thousands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: int, fits: bool
) -> None:
    """Also where little of it is kept: one megabyte stood for two gigabytes of tokenizing."""
    monkeypatch.setattr("router.pooling.checking.MOST_PAIRED_CHARS", 32 * 1004)
    async with open_port(tmp_path, pools) as port:
        takes(port, labels=1)
        body = {"query": "fox " * 250, "documents": ["fox "] * texts, "truncate_prompt_tokens": 1}
        url = f"http://{port.server.address}/rerank"
        asked = port.client.post(url, cast_to=object, body=body)
        if fits:
            assert await asked
            return
        with pytest.raises(openai.BadRequestError) as caught:
            await asked
        assert (caught.value.param, port.dispatcher.jobs) == ("documents", [])


@pytest.mark.parametrize(("limit", "most"), [("requests = 3", 3), ("tokens = 9", 4), ("", 9)])
async def test_a_call_has_no_more_under_way_than_its_tenant_may(
    tmp_path: Path, limit: str, most: int
) -> None:
    """Its own inputs were refused for each other, with the advice to try again, for ever. All
    prompts of completions run at once, so those are refused for good."""
    (tokens := tmp_path / "tokens.toml").write_text(f'"key-a" = "a"\n[limits.a]\n{limit}\n')
    under_way, seen = 0, []

    async def script(job: Job) -> AsyncGenerator[JobEvent]:
        nonlocal under_way
        seen.append(under_way := under_way + 1)
        await asyncio.sleep(0.01)
        under_way -= 1
        async for event in pools(job):
            yield event

    async with open_port(tmp_path, script, gate=TokenGate(tokens), api_key="key-a") as port:
        takes(port)
        given = {"model": "tiny", "input": [[70, 71]] * 9}
        assert len((await port.client.embeddings.create(**given)).data) == 9
        assert max(seen) == most
        if "requests" in limit:
            with pytest.raises(openai.RateLimitError) as caught:
                await port.client.completions.create(model="tiny", prompt=["fox"] * 4)
            assert caught.value.code == "quota_exceeded"
            assert caught.value.response.headers["x-should-retry"] == "false"


async def test_a_call_goes_on_beside_others_of_its_tenant(tmp_path: Path) -> None:
    """It failed as soon as another call took the place of a job that had ended: a long one always
    did. One that finds no room at its beginning is refused."""
    (tokens := tmp_path / "tokens.toml").write_text('"key-a" = "a"\n[limits.a]\nrequests = 2\n')
    most, others = 0, list[Job]()

    async def script(job: Job) -> AsyncGenerator[JobEvent]:
        nonlocal most
        quotas.enter(job)
        most = max(most, quotas._usage["a"].requests)
        await asyncio.sleep(0.001)
        async for event in pools(job):
            yield event
        quotas.leave(job)
        if len(others) < 5:  # Another call begins in the same moment.
            others.append(job)
            quotas.enter(job)
            asyncio.get_running_loop().call_later(0.01, quotas.leave, job)

    async with open_port(tmp_path, script, gate=TokenGate(tokens), api_key="key-a") as port:
        takes(port)
        quotas, client = port.dispatcher.quotas, port.client.with_options(max_retries=0)
        given = {"model": "tiny", "input": [[70, 71]] * 20}
        assert len((await client.embeddings.create(**given)).data) == 20
        assert (most, len(others)) == (2, 5)
        for _ in range(2):
            quotas.enter(others[0])
        with pytest.raises(openai.RateLimitError):
            await client.embeddings.create(**given)
        assert len(port.dispatcher.jobs) == 21


@pytest.mark.parametrize(
    ("limit", "fits", "more"),
    [("sequences = 4", 4, {"n": 2}), ("tokens = 12", 2, {"max_tokens": 6})],
)
async def test_prompts_are_refused_for_good_by_all_that_counts(
    tmp_path: Path, limit: str, fits: int, more: dict[str, Any]
) -> None:
    """Of their choices and tokens one prompt was refused for the others, to be tried again."""
    (tokens := tmp_path / "tokens.toml").write_text(f'"key-a" = "a"\n[limits.a]\n{limit}\n')
    async with open_port(
        tmp_path, says("The fox"), gate=TokenGate(tokens), api_key="key-a"
    ) as port:
        given: dict[str, Any] = {"model": "tiny", "max_tokens": 2}
        ids = [[70, 71]] * fits
        assert (await port.client.completions.create(**given, prompt=ids)).choices
        with pytest.raises(openai.RateLimitError) as caught:
            await port.client.completions.create(**given | more, prompt=ids[:3])
        assert caught.value.response.headers["x-should-retry"] == "false"
