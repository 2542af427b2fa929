"""Calls that are refused for now are sent again by the client's channel, as the service config
says and at the time that the router names; through real channels, sync and async."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import grpc
import pytest
from frontdoor_kit import Script, ScriptedDispatcher, fails, open_door, plays, served_model

from baton.client import clients as baton
from baton.errors import BatonError, BrokenOffError, OverloadedError, UnavailableError
from baton.grpc_options import SERVICE_CONFIG
from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.doors.grpc_edge import MAX_PUSHBACK_S
from router.jobs import Job, JobEvent

SOON_S = 0.05
Ask = Callable[[str, bool], list[int]]


def generates(address: str, retries: bool) -> list[int]:
    with baton.Client(address, retries=retries) as client:
        return list(client.generate(token_ids=[70, 71], timeout_s=20).token_ids)


def streams(address: str, retries: bool) -> list[int]:
    with baton.Client(address, retries=retries) as client:
        deltas = client.stream(token_ids=[70, 71], timeout_s=20)
        return [token_id for delta in deltas for token_id in delta.token_ids]


def streams_async(address: str, retries: bool) -> list[int]:
    async def ask() -> list[int]:
        async with baton.AsyncClient(address, retries=retries) as client:
            deltas = client.stream(token_ids=[70, 71], timeout_s=20)
            return [token_id async for delta in deltas for token_id in delta.token_ids]

    return asyncio.run(ask())


@pytest.fixture(params=[generates, streams, streams_async], ids=lambda ask: ask.__name__)
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param


def refuses(times: int, error: errors.RouterError, after: tuple[int, ...] = ()) -> Script:
    """The first calls fail, the next ones are answered."""
    left = [times]

    async def script(job: Job) -> AsyncGenerator[JobEvent, None]:
        left[0] -= 1
        chosen = fails(error, after) if left[0] >= 0 else plays([70, 71, 72])
        async for event in chosen(job):
            yield event

    return script


async def asked(tmp_path: Path, script: Script, ask: Ask, retries: bool = True):
    """What the client got, how often the router was asked, and how long it took, seconds."""
    dispatcher = ScriptedDispatcher([served_model(tmp_path)], script)
    async with open_door(dispatcher) as door:
        began_s = time.monotonic()
        try:
            got: object = await asyncio.to_thread(ask, door.address, retries)
        except BatonError as error:
            got = error
        return got, len(dispatcher.jobs), time.monotonic() - began_s


@pytest.mark.parametrize(
    "error",
    [errors.no_workers("tiny", SOON_S), errors.queue_full(9, SOON_S)],
    ids=lambda error: error.reason,
)
async def test_refused_for_now_and_asked_again(
    tmp_path: Path, ask: Ask, error: errors.RouterError
) -> None:
    got, times, _ = await asked(tmp_path, refuses(2, error), ask)
    assert (got, times) == ([70, 71, 72], 3)


async def test_the_routers_wait_is_kept(tmp_path: Path, ask: Ask) -> None:
    """It beats the service config's own, of at most 0.24 s at first."""
    got, times, took_s = await asked(tmp_path, refuses(1, errors.draining(0.6)), ask)
    assert (got, times) == ([70, 71, 72], 2)
    assert took_s >= 0.6


async def test_four_times_in_all(tmp_path: Path, ask: Ask) -> None:
    got, times, _ = await asked(tmp_path, refuses(99, errors.worker_lost(3, SOON_S)), ask)
    assert isinstance(got, UnavailableError)
    assert (got.reason, got.retry_after_s, times) == ("WORKER_LOST", SOON_S, 4)


async def test_a_long_wait_is_left_to_the_caller(tmp_path: Path, ask: Ask) -> None:
    full = errors.queue_full(9, MAX_PUSHBACK_S + 1)
    got, times, _ = await asked(tmp_path, refuses(1, full), ask)
    assert isinstance(got, OverloadedError)
    assert (got.retry_after_s, times) == (MAX_PUSHBACK_S + 1, 1)


async def test_never_once_tokens_were_streamed(tmp_path: Path, ask: Ask) -> None:
    """They are the client's; another run might say something else. A whole answer held none."""
    lost = errors.worker_lost_mid_stream(2)
    got, times, _ = await asked(tmp_path, refuses(1, lost, after=(70, 71)), ask)
    assert isinstance(got, BrokenOffError)
    assert times == 1
    unavailable = errors.kv_transfer_failed(3, SOON_S)
    got, times, _ = await asked(tmp_path, refuses(1, unavailable, after=(70, 71)), ask)
    if ask is generates:
        assert (got, times) == ([70, 71, 72], 2)
    else:
        assert isinstance(got, UnavailableError)
        assert times == 1


async def test_not_where_the_caller_wants_none(tmp_path: Path, ask: Ask) -> None:
    got, times, _ = await asked(tmp_path, refuses(1, errors.draining(SOON_S)), ask, retries=False)
    assert isinstance(got, UnavailableError)
    assert times == 1


def test_the_service_config_names_this_service_and_known_codes() -> None:
    config = json.loads(SERVICE_CONFIG.read_text())
    (method,) = config["methodConfig"]
    service = api.DESCRIPTOR.services_by_name["InferenceService"].full_name
    assert method["name"] == [{"service": service}]
    retryable = method["retryPolicy"]["retryableStatusCodes"]
    assert {grpc.StatusCode[name] for name in retryable} == {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.CANCELLED,
    }
