"""Whole worker processes: a real model, the real services, from the first byte to the exit code."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from nursery import Child, fork
from operators import post_status
from settings_kit import settings_of, variables_of
from test_worker_stream import RouterEnd
from tiny_models import write_tiny_model
from worker_kit import DECODE, PREFILL, WHOLE, until

from baton.grpc_options import server_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from engine import memory
from engine.engine import Engine
from router.dispatch.merge import step_tokens
from serving.net.internal_net import workers_net
from serving.settings import WRONG_USE, SettingsError
from serving.wire import pack_ids
from worker.engine_config import engine_config
from worker.process import _run_with, begin_address_file, main
from worker.router_addresses import RouterAddresses
from worker.server import SERVICE_NAME, Worker
from worker.settings import Role, WorkerSettings
from worker.watchdog import EXIT_DEVICE_LOST, EXIT_HUNG

START_S = 150.0
"""It was seen to take 45 s beside twenty other busy processes on two cores."""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=False)


def settings(tiny: Path, role: Role, **changes: Any) -> WorkerSettings:
    fields = {
        "role": role,
        "name": f"{role.value}-0",
        "model": str(tiny),
        "device": "cpu",
        "threads": 1,
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "routers": (),
        "num_pages": 80,
        "max_sequences": 8,
        "max_step_tokens": 32,
        "transport": "loopback",
    }
    return settings_of(WorkerSettings, **{**fields, **changes})


@asynccontextmanager
async def running(given: WorkerSettings) -> AsyncIterator[Worker]:
    engine = await asyncio.to_thread(Engine.build, engine_config(given))
    worker = Worker(given, engine, RouterAddresses(given.routers))
    await worker.start()
    try:
        yield worker
    finally:
        assert await worker.stop()


def submit(
    mode: worker_pb2.WorkMode.ValueType, prompt: list[int], attempt_id: bytes, **changes: Any
) -> worker_pb2.Submit:
    fields = {
        "attempt_id": attempt_id,
        "mode": mode,
        "prompt_ids": pack_ids(prompt),
        "sampling": worker_pb2.Sampling(top_p=1, repetition_penalty=1),
        "stopping": worker_pb2.Stopping(max_tokens=10, ignore_eos=True),
        "choices": 1,
    }
    return worker_pb2.Submit(**{**fields, **changes})


async def output_of(router: RouterEnd, attempt_id: bytes) -> list[int]:
    """Reads to the end of an attempt; its tokens."""
    finished = await router.heard("finished")
    assert finished.attempt_id == attempt_id
    return [
        token_id
        for kind, message in router.history
        if kind == "tokens"
        for drawn_for, tokens in step_tokens(message)
        if drawn_for == attempt_id
        for token_id in tokens.token_ids
    ]


async def introduce(routers: dict[str, RouterEnd], workers: dict[str, Worker]) -> None:
    for name, router in routers.items():
        for other in workers.values():
            if workers[name] is not other:
                await router.say(meet=worker_pb2.Meet(worker=other.identity))


async def test_two_workers_hand_off_what_one_computes_whole(tiny: Path) -> None:
    async with (
        running(settings(tiny, Role.PREFILL)) as p,
        running(settings(tiny, Role.DECODE)) as d,
    ):
        to_p, to_d = RouterEnd(p.identity.address), RouterEnd(d.identity.address)
        assert (await to_p.attach()).worker == p.identity
        assert (await to_d.attach()).worker == d.identity
        await introduce({"p": to_p, "d": to_d}, {"p": p, "d": d})
        rng = np.random.default_rng(3)
        for length in (1, 15, 16, 17, 100):
            prompt = rng.integers(1, 384, length).tolist()
            salt = {"cache_salt": rng.bytes(4)}
            whole, handed = rng.bytes(16), rng.bytes(16)
            await to_d.say(submit=submit(WHOLE, prompt, whole, **salt))
            expected = await output_of(to_d, whole)
            assert len(expected) == 10
            peers = {"peer_agent_name": p.agent_name}, {"peer_agent_name": d.agent_name}
            salt = {"cache_salt": rng.bytes(4)}
            await to_d.say(submit=submit(DECODE, prompt, handed, **peers[0], **salt))
            await to_p.say(submit=submit(PREFILL, prompt, handed, **peers[1], **salt))
            await to_p.say(grant=await to_d.heard("granted"))
            first = await to_p.heard("first_token")
            assert [record.token_id for record in first.records] == expected[:1]
            assert await output_of(to_d, handed) == expected
            await to_p.heard("prefill_done")
        for worker in (p, d):
            await until(lambda worker=worker: _all_back(worker))
        await to_p.close()
        await to_d.close()


def _all_back(worker: Worker) -> bool:
    load = worker.report().load
    return load.free_pages + load.evictable_pages == load.total_pages and not worker.services.active


async def test_health_metrics_and_credit_of_an_idle_worker(tiny: Path) -> None:
    async with running(settings(tiny, Role.BOTH, operator_token="secret")) as worker:
        assert await post_status(worker.admin.address, "") == 403
        assert await post_status(worker.admin.address, "Bearer secret") == 405
        async with grpc.aio.insecure_channel(worker.identity.address) as channel:
            for service in ("", SERVICE_NAME):
                request = health_pb2.HealthCheckRequest(service=service)
                answer = await health_pb2_grpc.HealthStub(channel).Check(request)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        page = await asyncio.to_thread(_read, f"http://{worker.admin.address}/metrics")
        assert "baton_kv_pages_capacity 79.0" in page
        assert await asyncio.to_thread(_read, f"http://{worker.admin.address}/health/ready")
        assert worker.report().load.prefill_credit_tokens == 64
        assert not worker.report().load.draining


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as page:
        return str(page.read(), "utf-8")


class RegistryRecorder(worker_pb2_grpc.RegistryServiceServicer):
    """A router that only takes announcements."""

    def __init__(self) -> None:
        self.heard: asyncio.Queue[worker_pb2.WorkerIdentity] = asyncio.Queue()

    async def Announce(
        self, request: worker_pb2.AnnounceRequest, context: Any
    ) -> worker_pb2.AnnounceResponse:
        if request.worker.address:  # before that it only says what it is loading
            self.heard.put_nowait(request.worker)
        return worker_pb2.AnnounceResponse(attached=True)


def begun(tiny: Path, router: str, **more: object) -> Child:
    options = {
        "role": "both",
        "model": str(tiny),
        "device": "cpu",
        "threads": "1",
        "admin": "127.0.0.1:0",
        "routers": router,
        "transport": "loopback",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    variables = variables_of({"drain_s": 20, **more})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "baton", "worker", *flags]
    return fork(command, environment, tiny.with_name("worker.log"))


@asynccontextmanager
async def a_process(tiny: Path, **more: object) -> AsyncIterator[tuple[Child, RouterEnd]]:
    """A worker process, and a router that is attached to it."""
    recorder = RegistryRecorder()
    registry = grpc.aio.server(options=server_options())
    worker_pb2_grpc.add_RegistryServiceServicer_to_server(recorder, registry)
    port = registry.add_insecure_port("127.0.0.1:0")
    await registry.start()
    process = await asyncio.to_thread(begun, tiny, f"127.0.0.1:{port}", num_pages=200, **more)
    try:
        async with asyncio.timeout(START_S):
            identity = await recorder.heard.get()
        router = RouterEnd(identity.address)
        assert (await router.attach()).worker == identity
        yield process, router
        await router.close()
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)
        await registry.stop(None)


async def test_sigterm_finishes_what_runs_and_exits_clean(tiny: Path) -> None:
    # It is to run still when the late one comes, even from a test that stood still for a second.
    async with a_process(tiny, failpoints="engine.step=sleep:2@20") as (process, router):
        running_id, late_id = b"r" * 16, b"l" * 16
        stopping = worker_pb2.Stopping(max_tokens=200, ignore_eos=True)
        await router.say(submit=submit(WHOLE, [5] * 40, running_id, stopping=stopping))
        await router.heard("first_token")
        process.send_signal(signal.SIGTERM)
        while not (await router.heard("load")).draining:
            pass
        await router.say(submit=submit(WHOLE, [5] * 40, late_id))
        failed = await router.heard("failed")
        assert failed.attempt_id == late_id
        assert failed.reason == worker_pb2.FAILURE_REASON_DRAINING
        if "finished" not in dict(router.history):
            assert (await router.heard("finished")).output_tokens == 200
        assert await asyncio.to_thread(process.wait, START_S) == 0


async def test_sigusr2_writes_a_profile_of_what_runs(tiny: Path, tmp_path: Path) -> None:
    async with a_process(tiny, profile_dir=tmp_path) as (process, router):
        process.send_signal(signal.SIGUSR2)
        stopping = worker_pb2.Stopping(max_tokens=100, ignore_eos=True)
        await router.say(submit=submit(WHOLE, [5] * 40, b"r" * 16, stopping=stopping))
        assert (await router.heard("finished")).output_tokens == 100
        await until(lambda: os.listdir(tmp_path), START_S)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, START_S) == 0


async def test_a_second_sigterm_cuts_it_short(tiny: Path) -> None:
    async with a_process(tiny) as (process, router):
        stopping = worker_pb2.Stopping(max_tokens=2000, ignore_eos=True)
        await router.say(submit=submit(WHOLE, [5] * 40, b"r" * 16, stopping=stopping))
        await router.heard("first_token")
        process.send_signal(signal.SIGTERM)
        while not (await router.heard("load")).draining:
            pass
        process.send_signal(signal.SIGTERM)
        failed = await router.heard("failed")
        assert failed.reason == worker_pb2.FAILURE_REASON_DRAINING
        assert await asyncio.to_thread(process.wait, START_S) == 1


async def test_a_step_that_hangs_does_not_hold_up_the_end(tiny: Path) -> None:
    hangs = {"failpoints": "engine.step=hang@2", "step_timeout_s": 5, "drain_s": 0}
    async with a_process(tiny, **hangs) as (process, router):
        stopping = worker_pb2.Stopping(max_tokens=2000, ignore_eos=True)
        await router.say(submit=submit(WHOLE, [5] * 40, b"r" * 16, stopping=stopping))
        await router.heard("first_token")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, START_S) == EXIT_HUNG


async def test_an_error_in_the_step_loop_ends_the_worker_at_once(tiny: Path) -> None:
    async with a_process(tiny, failpoints="engine.turn=raise@300") as (process, router):
        stopping = worker_pb2.Stopping(max_tokens=2000, ignore_eos=True)
        await router.say(submit=submit(WHOLE, [5] * 40, b"r" * 16, stopping=stopping))
        await router.heard("first_token")
        assert await asyncio.to_thread(process.wait, START_S) == EXIT_DEVICE_LOST


@pytest.mark.parametrize("wrong", [{"max_step_tokens": 1}, {"kv_memory_gib": 1 << 20}, "model"])
def test_who_is_started_again_in_vain_says_so(
    tiny: Path, tmp_path: Path, wrong: dict[str, int] | str
) -> None:
    if wrong == "model":
        tiny, wrong = tmp_path, {}
        (tiny / "config.json").write_text('{"architectures": ["Unknown"], "model_type": "none"}')
    assert begun(tiny, "127.0.0.1:9", **wrong).wait(START_S) == WRONG_USE


@pytest.mark.parametrize(("all_bytes", "code"), [(1 << 50, 1), (1 << 20, WRONG_USE)])
def test_memory_that_others_have_may_be_there_another_time(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, all_bytes: int, code: int
) -> None:
    monkeypatch.setattr(memory, "available_and_all_bytes", lambda: (0, all_bytes))
    given = settings(tiny, Role.BOTH)
    routers, net = RouterAddresses(given.routers), workers_net(given.tls, given.name)
    assert _run_with(given, "test", routers, net, None) == code


@pytest.mark.parametrize(("cuda", "code"), [("13.0", 1), (None, WRONG_USE)])
def test_a_gpu_may_be_there_another_time(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, code: int
) -> None:
    """Its driver may be loaded later. A build of PyTorch without CUDA never sees one."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = settings(tiny, Role.BOTH, device="cuda")
    routers, net = RouterAddresses(given.routers), workers_net(given.tls, given.name)
    assert _run_with(given, "test", routers, net, None) == code


def test_an_address_file_is_tried_before_the_model_is_read(tiny: Path, tmp_path: Path) -> None:
    """And emptied: a probe would ask whoever had the address before."""
    file = tmp_path / "address"
    file.write_text("127.0.0.1:9\n")
    begin_address_file(str(file))
    assert file.read_text() == ""
    with pytest.raises(SettingsError, match=r"`debug\.address_file`: /nowhere/x: No such file"):
        main(settings(tiny, Role.BOTH, model="/not/there", address_file="/nowhere/x"))
