"""A worker whose every answer is written by the test, behind a real gRPC server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from opentelemetry.context import Context
from settings_kit import settings_of
from waiting import WAIT_S, until

from baton.addresses import port_of
from baton.grpc_options import server_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from router.dispatch.dispatcher import JobDispatcher
from router.errors import RouterError
from router.events import NO_EVENTS, RouterEvents
from router.jobs import Job, JobEvent, JobTokens, ServedModel
from router.placement.cost import Cost
from router.settings import RouterSettings
from router.workers.registry import Registry
from serving.net.internal_net import ClearNet, InternalNet
from serving.release import stamp
from serving.wire import pack_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from router.workers.link import WorkerLink

BUSY_S = 3.0
"""What a busy machine may add to something that takes a time of its own."""
PATIENT = {"stale_after_s": 60, "attach_timeout_s": 60}
"""Settings of a router that takes nobody for frozen or absent because the machine stood still."""
PAGE_SIZE_TOKENS = 16
PREFILL = worker_pb2.WORKER_ROLE_PREFILL
DECODE = worker_pb2.WORKER_ROLE_DECODE
BOTH = worker_pb2.WORKER_ROLE_BOTH
_epochs = itertools.count(1)


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """Records what it is sent, says what the test makes it say, and reports load by itself."""

    def __init__(
        self,
        worker_id: str,
        role: int,
        *,
        model: str = "tiny",
        revision: str = "r",
        fingerprint: str = "f",
        extensions: Sequence[str] = (),
        transport: str = "null",
        flexible: bool = False,
        failure_unit: str = "",
        adapters: Mapping[str, bytes] | None = None,
    ) -> None:
        epoch = next(_epochs)
        self.adapters = adapters
        """What it says of its adapters when a stream begins; None: it takes none."""
        self.identity = worker_pb2.WorkerIdentity(
            worker_id=worker_id,
            epoch=epoch,
            role=role,
            flexible=flexible,
            failure_unit=failure_unit,
            model=worker_pb2.ModelInfo(
                name=model,
                path=f"/{model}",
                revision=revision,
                fingerprint=fingerprint,
                max_context_tokens=256,
                vocab_size=100,
                page_size_tokens=PAGE_SIZE_TOKENS,
                extensions=extensions,
            ),
            endpoint=worker_pb2.KvEndpoint(agent_name=f"{worker_id}@{epoch}", transport=transport),
        )
        stamp(self.identity)
        self.load = worker_pb2.Load(
            max_sequences=8, total_pages=100, free_pages=100, prefill_credit_tokens=64
        )
        self.history: list[worker_pb2.WorkRequest] = []
        self.frozen = False
        self.reports_by_itself = True
        self._known: list[bytes] = []
        """Attempts that the next report names."""
        """On the stream there is."""
        self._inbox: dict[str, deque[Any]] = {}
        self._arrived = asyncio.Condition()
        self._outbox: asyncio.Queue[worker_pb2.WorkResponse] = asyncio.Queue()
        self._server = grpc.aio.server(options=server_options())
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)

    @property
    def agent_name(self) -> str:
        return self.identity.endpoint.agent_name

    async def start(self, address: str = "127.0.0.1:0", net: InternalNet | None = None) -> None:
        port = port_of((net or ClearNet()).bind(self._server, address))
        self.identity.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def Work(
        self, request_iterator: AsyncIterator[worker_pb2.WorkRequest], context: Any
    ) -> AsyncIterator[worker_pb2.WorkResponse]:
        await anext(request_iterator)
        yield worker_pb2.WorkResponse(attached=worker_pb2.Attached(worker=self.identity))
        self._outbox, self._known = asyncio.Queue(), []
        if self.adapters is not None:
            self.tell_adapters(self.adapters)
        self.report()
        tasks = [
            asyncio.create_task(self._receive(request_iterator)),
            asyncio.create_task(self._report_forever()),
        ]
        try:
            while True:
                yield await self._outbox.get()
        finally:
            for task in tasks:
                task.cancel()

    def report(self, **changes: Any) -> None:
        """Sends a load report, as the step loop does after every turn."""
        for name, value in changes.items():
            setattr(self.load, name, value)
        self.load.progress += not self.frozen
        self.load.ClearField("known_attempts")
        self.load.known_attempts.extend(self._known)
        self._known.clear()
        self._outbox.put_nowait(worker_pb2.WorkResponse(load=self.load))

    def tell_adapters(self, named: Mapping[str, bytes]) -> None:
        """Says which adapters it has."""
        told = [worker_pb2.Adapter(name=name, digest=digest) for name, digest in named.items()]
        self.say(adapters=worker_pb2.Adapters(adapters=told))

    def say(self, **message: Any) -> None:
        """Sends one message, such as `say(failed=Failed(...))`."""
        self._outbox.put_nowait(worker_pb2.WorkResponse(**message))

    async def heard(self, kind: str) -> Any:
        """The next message of that kind, as soon as it has come."""
        async with asyncio.timeout(WAIT_S), self._arrived:
            await self._arrived.wait_for(lambda: self._inbox.get(kind))
            return self._inbox[kind].popleft()

    def count(self, kind: str) -> int:
        """Messages of that kind that came and were not yet taken by `heard`."""
        return len(self._inbox.get(kind, ()))

    # What prefill workers say.

    def first_token(self, attempt_id: bytes, *token_ids: int, cached: int = 0) -> None:
        records = [worker_pb2.TokenRecord(token_id=token_id) for token_id in token_ids]
        self.say(
            first_token=worker_pb2.FirstToken(
                attempt_id=attempt_id, records=records, cached_prompt_tokens=cached
            )
        )

    def prefill_done(self, attempt_id: bytes) -> None:
        done = worker_pb2.PrefillDone(
            attempt_id=attempt_id,
            received_unix_ns=1_000,
            started_unix_ns=1_100,
            computed_unix_ns=1_300,
            sent_unix_ns=1_600,
        )
        self.say(prefill_done=done)

    # What decode workers say.

    def grant(self, attempt_id: bytes) -> None:
        self.say(
            granted=worker_pb2.Grant(
                attempt_id=attempt_id,
                transfer_id=b"t" * 16,
                decode_epoch=self.identity.epoch,
                decode_agent_name=self.agent_name,
                page_ids=pack_ids([1]),
            )
        )

    def delivered(self, attempt_id: bytes) -> None:
        self.say(delivered=worker_pb2.Delivered(attempt_id=attempt_id, delivered_unix_ns=1_600))

    def tokens(self, attempt_id: bytes, first: int, *token_ids: int, choice: int = 0) -> None:
        count = len(token_ids)
        self.say(
            tokens=worker_pb2.Tokens(
                attempt_ids=[attempt_id] * count,
                choice_indices=pack_ids([choice] * count),
                indices=pack_ids(range(first, first + count)),
                token_ids=pack_ids(token_ids),
            )
        )

    def finished(self, attempt_id: bytes, output_tokens: int, choice: int = 0) -> None:
        self.say(
            finished=worker_pb2.Finished(
                attempt_id=attempt_id,
                choice_index=choice,
                reason=worker_pb2.END_REASON_LENGTH,
                output_tokens=output_tokens,
                timings=worker_pb2.WorkTimings(
                    ready_unix_ns=1_600, joined_unix_ns=1_700, last_token_unix_ns=2_000
                ),
            )
        )

    def failed(self, attempt_id: bytes, reason: int, hook: str = "") -> None:
        self.say(failed=worker_pb2.Failed(attempt_id=attempt_id, reason=reason, hook=hook))

    def aborted(self, attempt_id: bytes, *, already_ready: bool) -> None:
        self.say(aborted=worker_pb2.Aborted(attempt_id=attempt_id, already_ready=already_ready))

    async def _receive(self, requests: AsyncIterator[worker_pb2.WorkRequest]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            assert kind is not None
            async with self._arrived:
                self.history.append(request)
                if kind == "submit":
                    self._known.append(request.submit.attempt_id)
                self._inbox.setdefault(kind, deque()).append(getattr(request, kind))
                self._arrived.notify_all()

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            if self.reports_by_itself:
                self.report()


class Cluster:
    """A dispatcher with a registry, and scripted workers that are attached to it."""

    def __init__(
        self, events: RouterEvents = NO_EVENTS, policy: type[Cost] = Cost, **settings: Any
    ) -> None:
        self.settings = settings_of(RouterSettings, **{"name": "router", **PATIENT, **settings})
        self.policy = policy()
        self.dispatcher = JobDispatcher(self.settings, events, self.policy)
        self.registry = Registry(self.settings, self.dispatcher)
        self.workers: list[ScriptedWorker] = []

    async def add(self, worker_id: str, role: int, **options: Any) -> ScriptedWorker:
        worker = ScriptedWorker(worker_id, role, **options)
        self.workers.append(worker)
        await worker.start()
        self.registry.announce(worker.identity)
        await until(lambda: self.has_load(worker))
        return worker

    async def pair(self) -> tuple[ScriptedWorker, ScriptedWorker]:
        return await self.add("p0", PREFILL), await self.add("d0", DECODE)

    async def begun(self, job: Job) -> tuple[ScriptedWorker, ScriptedWorker, Reader, bytes]:
        """A pair whose prefill worker has the job, the job's reader, and the attempt's id."""
        prefill, decode = await self.pair()
        reader = self.read(job)
        return prefill, decode, reader, (await prefill.heard("submit")).attempt_id

    def has_load(self, worker: ScriptedWorker) -> bool:
        return any(
            link.identity.epoch == worker.identity.epoch and link.estimate.load.total_pages
            for link in self.registry.members
        )

    def link(self, worker: ScriptedWorker) -> WorkerLink:
        """The router's link to an attached worker."""
        epoch = worker.identity.epoch
        return next(link for link in self.registry.members if link.identity.epoch == epoch)

    async def caught_up(self, worker: ScriptedWorker) -> None:
        """The router has read all that the worker said until now."""
        worker.report()
        said, link = worker.load.progress, self.link(worker)
        await until(lambda: link.progress >= said)

    def read(self, job: Job) -> Reader:
        return Reader(self.dispatcher, job)

    async def close(self) -> None:
        """Closes everything, and sees that the router side left no task behind."""
        await self.registry.close()
        # What ends a generator that was dropped is a task, too, and has no name.
        left = {getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()}
        for worker in self.workers:
            await worker.stop()
        assert not {name for name in left if name.startswith(("WorkerLink", "Registry"))}

    def check_nothing_leaked(self) -> None:
        """No job, no attempt, no place in the queue and no charge is left."""
        assert self.dispatcher.active_jobs == 0
        assert self.dispatcher.active_attempts == 0
        assert self.dispatcher.queued_jobs == 0
        assert all(link.estimate.open_reservations == 0 for link in self.registry.members)


def with_settings(**settings: Any) -> pytest.MarkDecorator:
    """The settings of a test's `cluster`."""
    return pytest.mark.parametrize("cluster", [settings], indirect=True, ids=[""])


async def error_of(reader: Reader) -> RouterError:
    """What a job fails with."""
    with pytest.raises(RouterError) as raised:
        await reader.end()
    return raised.value


class Reader:
    """A front door's side of a job: hears its events, and awaits its end in a task of its own."""

    def __init__(self, dispatcher: JobDispatcher, job: Job) -> None:
        self.job = job
        self.events: list[JobEvent] = []
        self._dispatcher = dispatcher
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def end(self) -> list[JobEvent]:
        """All events; raises what the dispatcher raised."""
        async with asyncio.timeout(WAIT_S):
            await self._task
        return self.events

    async def until(self, count: int) -> list[JobEvent]:
        """Waits for that many events."""
        async with asyncio.timeout(WAIT_S):
            while len(self.events) < count:
                self._more.clear()
                await self._more.wait()
        return self.events

    async def leave(self) -> None:
        """The client vanishes."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        await self._dispatcher.run(self.job, self._hear)

    def _hear(self, event: JobEvent) -> None:
        self.events.append(event)
        self._more.set()


def job(
    *,
    prompt_tokens: int = 4,
    max_tokens: int = 8,
    choices: int = 1,
    deadline_s: float = 60,
    model: str = "tiny",
    revision: str = "r",
    **options: Any,
) -> Job:
    """A job for the scripted workers' model."""
    now_ns = time.time_ns()
    return Job(
        id="0" * 31 + "1",
        model=ServedModel(model, revision, f"/{model}", 256, 100, (), PAGE_SIZE_TOKENS),
        prompt_ids=np.arange(prompt_tokens, dtype=np.uint32) % 100,
        sampling=worker_pb2.Sampling(),
        stopping=worker_pb2.Stopping(max_tokens=max_tokens),
        choices=choices,
        arrived_ns=now_ns,
        deadline_ns=now_ns + round(deadline_s * 1e9),
        context=Context(),
        **options,
    )


def tokens_of(events: Sequence[JobEvent], choice: int = 0) -> list[int]:
    """The tokens of a choice; fails where they leave a gap or repeat."""
    output: list[int] = []
    for event in events:
        if isinstance(event, JobTokens) and event.choice == choice:
            assert event.first_index == len(output)
            output += event.token_ids
    return output
