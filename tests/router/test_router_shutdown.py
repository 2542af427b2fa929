"""A router process that is told to end: what runs, what comes, and its exit code."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from frontdoor_kit import refusal
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_worker import BOTH, WAIT_S, ScriptedWorker

from baton.grpc_options import channel_options
from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc as api_grpc
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from router.doors.frontdoor import SERVICE_NAME
from serving.event_loop import MAX_OPEN_FILES

SERVING = health_pb2.HealthCheckResponse.SERVING
START_S = 60.0
GRACE_S = 2.0
SECRET = "words of a prompt"
CODE = f"""
import asyncio
import sys
from router import server
from router.settings import RouterSettings

ports = dict.fromkeys(("listen", "internal_listen", "http_listen", "admin"), "127.0.0.1:0")
start = server.RouterServer.start

async def break_unseen():
    raise ValueError({SECRET!r})

async def start_and_tell(self):
    await start(self)
    asyncio.create_task(break_unseen())
    print(self.address, self.internal_address, self.admin.address, flush=True)

server.RouterServer.start = start_and_tell
drain_s, grace_s = map(float, sys.argv[1:])
debug = dict(stale_after_s=60, attach_timeout_s=60, drain_grace_s=grace_s)
settings = RouterSettings(drain_s=drain_s, debug=debug, **ports)
sys.exit(server.main(settings))
"""


@dataclass
class Running:
    """A router process, a worker attached to it, and a request that has begun to answer."""

    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel
    worker: ScriptedWorker
    stub: Any
    admin: str
    call: Any = None
    attempt: bytes = b""

    async def begin(self) -> None:
        self.call = self.stub.StreamGenerate(request())
        self.attempt = (await self.worker.heard("submit")).attempt_id
        self.worker.first_token(self.attempt, 10)
        await self.call.read()

    async def finish(self) -> None:
        """The request gets its last token, and its end."""
        self.worker.tokens(self.attempt, 1, 11)
        self.worker.finished(self.attempt, 2)
        assert (await self.rest())[-1].finished.usage.output_tokens == 2

    async def rest(self) -> list[api.StreamGenerateResponse]:
        messages = []
        while (message := await self.call.read()) is not grpc.aio.EOF:
            messages.append(message)
        return messages

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def health(self) -> Any:
        check = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        return (await health_pb2_grpc.HealthStub(self.channel).Check(check)).status

    async def until_health(self, *, serving: bool) -> None:
        async with asyncio.timeout(WAIT_S):
            while (await self.health() == SERVING) is not serving:
                await asyncio.sleep(0.01)

    async def refused(self) -> str:
        """Why a new request is, as soon as it is: nobody answers one that is still let in."""
        while True:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await self.stub.Generate(api.GenerateRequest(input=request().input), timeout=1.0)
            if caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                return refusal(caught.value).info.reason

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), WAIT_S)


def request() -> api.StreamGenerateRequest:
    prompt = api.GenerationInput(token_ids=api.TokenIds(ids=[1, 2, 3]))
    prompt.stop.max_tokens = 2
    return api.StreamGenerateRequest(input=prompt)


def _as_a_shell_starts_it(*command: str) -> list[str]:
    """The command, by a shell. Python would fork to run code of ours first, and gRPC, of which the
    tests before may have left threads, aborts some of its forks."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ["sh", "-c", f'ulimit -S -n {min(1024, most - 1)} && exec "$@"', "sh", *command]


@asynccontextmanager
async def a_router_process(
    drain_s: float, grace_s: float = 0.0, **model: Any
) -> AsyncIterator[Running]:
    """Serves one worker; `model` changes what that says of its model."""
    process = await asyncio.create_subprocess_exec(
        *_as_a_shell_starts_it(sys.executable, "-c", CODE, str(drain_s), str(grace_s)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    worker = ScriptedWorker("b0", BOTH)
    worker.identity.model.MergeFrom(worker_pb2.ModelInfo(**model))
    await worker.start()
    try:
        assert process.stdout is not None
        told = await asyncio.wait_for(process.stdout.readline(), START_S)
        address, internal, admin = told.decode().split()
        async with grpc.aio.insecure_channel(internal) as channel:
            registry = worker_pb2_grpc.RegistryServiceStub(channel)
            await registry.Announce(worker_pb2.AnnounceRequest(worker=worker.identity))
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stub = api_grpc.InferenceServiceStub(channel)
            running = Running(process, channel, worker, stub, admin)
            await running.until_health(serving=True)
            yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await worker.stop()


async def test_what_runs_is_finished_and_what_comes_is_refused() -> None:
    async with a_router_process(drain_s=WAIT_S) as router:
        await router.begin()
        router.signal()
        await router.until_health(serving=False)
        async with asyncio.timeout(WAIT_S):
            assert await router.refused() == "DRAINING"
        assert (await router.stub.ListModels(api.ListModelsRequest())).models
        assert router.process.returncode is None
        await router.finish()
        assert await router.exit_code() == 0


async def test_one_that_is_idle_does_not_wait() -> None:
    """And while it ran it had the connections that the system lets it have, and logged an exception
    that nobody awaited, without the words of that."""
    async with a_router_process(drain_s=10 * WAIT_S) as router:
        soft, hard = resource.prlimit(router.process.pid, resource.RLIMIT_NOFILE)
        assert soft == min(hard, MAX_OPEN_FILES)
        router.signal()
        assert await router.exit_code() == 0
        assert router.process.stderr is not None
        logged = (await router.process.stderr.read()).decode()
        assert "ValueError" in logged
        assert SECRET not in logged


async def test_for_a_grace_it_serves_on_while_health_sends_clients_elsewhere() -> None:
    async with a_router_process(drain_s=WAIT_S, grace_s=GRACE_S) as router:
        router.signal()
        await router.until_health(serving=False)
        await router.begin()
        await asyncio.sleep(GRACE_S)
        async with asyncio.timeout(WAIT_S):
            assert await router.refused() == "DRAINING"
        await router.finish()
        assert await router.exit_code() == 0


@pytest.mark.parametrize("second_signal", [True, False])
async def test_what_does_not_finish_ends_with_draining(second_signal: bool) -> None:
    """After a second signal, or when the time is up."""
    async with a_router_process(drain_s=WAIT_S if second_signal else 0.3) as router:
        await router.begin()
        router.signal()
        if second_signal:  # one that comes too soon after the first could be taken for it
            await router.until_health(serving=False)
            router.signal()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.rest()
        found = refusal(caught.value)
        assert (found.code.name, found.info.reason) == ("UNAVAILABLE", "DRAINING")
        assert (await router.worker.heard("cancel")).attempt_id == router.attempt
        assert await router.exit_code() == 1
