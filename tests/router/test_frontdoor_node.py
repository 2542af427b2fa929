"""A client in Node meets the front door's statuses: it reads their details, and retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from frontdoor_kit import ScriptedDispatcher, fails, open_door, plays, served_model
from node_kit import run_scenario

from router import errors
from router.jobs import Job, JobEvent

pytestmark = pytest.mark.clients

REFUSAL = errors.queue_full(9, 0.25)


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
