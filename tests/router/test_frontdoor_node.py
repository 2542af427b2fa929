"""A client in Node meets the front door's statuses, and reads their details, and retries. It reads
streams, leaves them, and has them end at its deadline. All that at the fast door, too."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path

import frontdoor_kit
import pytest
from frontdoor_kit import (
    ScriptedDispatcher,
    fails,
    open_door,
    plays,
    served_model,
    write_tokenizer,
)
from node_kit import run_scenario

from router import errors
from router.jobs import Job, JobEvent, JobStarted, JobTokens

pytestmark = pytest.mark.clients

REFUSAL = errors.queue_full(9, 0.25)
WORDS = [70 + index % 20 for index in range(24)]


@pytest.fixture(autouse=True, params=["grpcs_door", "fast_door"])
def door(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(frontdoor_kit, "DOORS", [getattr(frontdoor_kit, request.param)])
    return str(request.param)


@pytest.mark.parametrize("scenario", ["whole", "cancel", "deadline"])
async def test_streams_in_node(tmp_path: Path, scenario: str) -> None:
    async def on_and_on(job: Job) -> AsyncGenerator[JobEvent, None]:
        yield JobStarted()
        for index in itertools.count():
            yield JobTokens(0, index, (70,))
            await asyncio.sleep(0.01)

    write_tokenizer(tmp_path)
    script = plays(WORDS) if scenario == "whole" else on_and_on
    dispatcher = ScriptedDispatcher([served_model(tmp_path, max_context_tokens=4096)], script)
    async with open_door(dispatcher) as door:
        seen = await asyncio.to_thread(run_scenario, scenario, door.address)
        await asyncio.wait_for(dispatcher.closed.wait(), 20)
    if scenario == "whole":
        assert seen["streamed"]["tokenIds"] == WORDS
        assert "".join(seen["streamed"]["texts"]) == seen["unary"]
        assert [one["name"] for one in seen["models"]] == ["tiny"]
    elif scenario == "cancel":
        assert seen["error"]["code"] == "CANCELLED"
        assert len(seen["tokenIds"]) >= 5
    else:
        assert seen["error"]["code"] == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize(("scenario", "times"), [("retried", 3), ("refused", 1)])
async def test_the_service_config_holds_in_node(tmp_path: Path, scenario: str, times: int) -> None:
    async def refuses_twice(job: Job) -> AsyncGenerator[JobEvent, None]:
        chosen = fails(REFUSAL) if len(dispatcher.jobs) < 3 else plays([70, 71, 72])
        async for event in chosen(job):
            yield event

    dispatcher = ScriptedDispatcher([served_model(tmp_path)], refuses_twice)
    async with open_door(dispatcher) as door:
        seen = await asyncio.to_thread(run_scenario, scenario, door.address)
    assert len(dispatcher.jobs) == times
    if scenario == "retried":
        assert (seen["tokenIds"], seen["error"]) == ([70, 71, 72], None)
        return
    error = seen["error"]
    assert (error["code"], error["message"]) == ("RESOURCE_EXHAUSTED", REFUSAL.message)
    assert error["ErrorInfo"]["reason"] == "QUEUE_FULL"
    assert error["ErrorInfo"]["domain"] == errors.DOMAIN
    assert error["ErrorInfo"]["metadata"] == {"queued_requests": "9"}
    assert error["RetryInfo"]["retryDelay"] == {"seconds": "0", "nanos": 250_000_000}
    assert len(error["RequestInfo"]["requestId"]) == 32
