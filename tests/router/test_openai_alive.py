"""A silent stream shows that it lives: headers and comments, then its tokens or its error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import openai
import pytest
from frontdoor_kit import TIMINGS
from openai_kit import Port, Script, open_port, says

from baton.worker.v1 import worker_pb2
from router import errors
from router.doors.http import edge
from router.jobs import ChoiceEnded, Job, JobEvent, JobFinished, JobStarted, JobTokens

SILENT_S = 0.1
STILL_SILENT_S = 0.3
ASKED = {"model": "tiny", "prompt": "a", "stream": True}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "SILENT_S", SILENT_S)
    monkeypatch.setattr(edge, "STILL_SILENT_S", STILL_SILENT_S)


@asynccontextmanager
async def open_warm(folder: Path, script: Script) -> AsyncIterator[Port]:
    """A port whose tokenizer is read: that takes longer than the silence."""
    async with open_port(folder, script) as port:
        url = f"http://{port.server.address}/tokenize"
        answer = await port.client._client.post(url, json={"prompt": "a"})
        assert answer.status_code == 200
        yield port


class Paused:
    """A script that goes on when it is told to."""

    def __init__(self, error: errors.RouterError | None = None) -> None:
        self.go_on = asyncio.Event()
        self._error = error

    async def __call__(self, job: Job) -> AsyncGenerator[JobEvent, None]:
        await self.go_on.wait()
        if self._error is not None:
            raise self._error
        yield JobStarted()
        yield JobTokens(0, 0, (70,))
        yield ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, 1)
        yield JobFinished(TIMINGS)


async def test_headers_and_comments_come_before_the_first_token(tmp_path: Path) -> None:
    script = Paused()
    async with open_warm(tmp_path, script) as port:
        url, client = f"http://{port.server.address}/v1/completions", port.client._client
        clock = asyncio.get_running_loop().time
        began_s = clock()
        async with client.stream("POST", url, json=ASKED) as answer:
            assert answer.status_code == 200, "no token is there"
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert clock() - began_s >= SILENT_S
            lines, came_s = [], []
            async for line in answer.aiter_lines():
                lines.append(line)
                came_s.append(clock() - began_s)
                if lines.count(": keepalive") == 3:
                    script.go_on.set()
    comments_s = [came for line, came in zip(lines, came_s, strict=True) if line[:1] == ":"]
    assert lines[:6] == [": keepalive", ""] * 3
    assert comments_s[1] >= SILENT_S + 0.9 * STILL_SILENT_S, "the others come more rarely"
    assert [line[:6] for line in lines[6:] if line] == ["data: "] * 3
    assert lines[-2] == "data: [DONE]"


async def test_an_error_after_a_comment_is_the_last_event(tmp_path: Path) -> None:
    script = Paused(errors.numerical_error())
    async with open_warm(tmp_path, script) as port:
        stream = await port.client.completions.create(**ASKED)
        script.go_on.set()
        with pytest.raises(openai.APIError) as caught:
            await anext(stream)
    assert caught.value.code == "numerical_error"


async def test_who_leaves_during_the_silence_ends_the_work(tmp_path: Path) -> None:
    async with open_warm(tmp_path, Paused()) as port:
        stream = await port.client.completions.create(**ASKED)
        await stream.close()
        async with asyncio.timeout(10):
            await port.dispatcher.closed.wait()


async def test_a_refusal_that_comes_soon_has_its_own_status(tmp_path: Path) -> None:
    script = Paused(errors.numerical_error())
    script.go_on.set()
    async with open_warm(tmp_path, script) as port:
        with pytest.raises(openai.InternalServerError):
            await port.client.completions.create(**ASKED)


async def test_tokens_that_come_need_no_comments(tmp_path: Path) -> None:
    async def often(job: Job) -> AsyncGenerator[JobEvent, None]:
        yield JobStarted()
        for index in range(10):
            yield JobTokens(0, index, (70,))
            await asyncio.sleep(SILENT_S / 3)
        yield ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, 10)
        yield JobFinished(TIMINGS)

    for script, is_stream in ((often, True), (says("a"), False)):
        async with open_warm(tmp_path, script) as port:
            url = f"http://{port.server.address}/v1/completions"
            answer = await port.client._client.post(url, json={**ASKED, "stream": is_stream})
        assert answer.status_code == 200
        assert "keepalive" not in answer.text
