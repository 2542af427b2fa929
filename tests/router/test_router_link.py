"""A stream to a worker: attaching, overtaking, and every way in which it is lost."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from scripted_worker import DECODE, ScriptedWorker, until

from baton.worker.v1 import worker_pb2
from router.deaths.probe import process_is_gone
from router.workers.link import LinkState, Loss, WorkerLink
from router.workers.load_estimate import Reservation
from router.workers.send_queue import SendQueue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

A, B = b"a" * 16, b"b" * 16


class Owner:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.was_attached = asyncio.Event()
        self.loads = 0
        self.messages: list[worker_pb2.WorkResponse] = []
        self.losses: list[tuple[Loss, LinkState]] = []

    def attached(self, link: WorkerLink) -> None:
        self.was_attached.set()

    def loaded(self, link: WorkerLink) -> None:
        self.loads += 1

    def received(self, link: WorkerLink, message: worker_pb2.WorkResponse) -> None:
        self.messages.append(message)

    def lost(self, link: WorkerLink, loss: Loss, was: LinkState) -> None:
        self.losses.append((loss, was))


@asynccontextmanager
async def linked(
    identity: worker_pb2.WorkerIdentity, stale_after_s: float = 3.0
) -> AsyncIterator[tuple[WorkerLink, Owner]]:
    owner = Owner()
    link = WorkerLink(identity, "router", owner, stale_after_s=stale_after_s, attach_timeout_s=60.0)
    task = asyncio.create_task(link.run())
    try:
        yield link, owner
    finally:
        link.end(Loss.CLOSED)
        await task
    assert len(owner.losses) == 1


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    worker = ScriptedWorker("d0", DECODE)
    await worker.start()
    yield worker
    await worker.stop()


def submit(attempt_id: bytes) -> worker_pb2.WorkRequest:
    return worker_pb2.WorkRequest(submit=worker_pb2.Submit(attempt_id=attempt_id))


def cancel(attempt_id: bytes) -> worker_pb2.WorkRequest:
    return worker_pb2.WorkRequest(cancel=worker_pb2.Cancel(attempt_id=attempt_id))


def abort(attempt_id: bytes) -> worker_pb2.WorkRequest:
    return worker_pb2.WorkRequest(abort=worker_pb2.Abort(attempt_id=attempt_id))


async def test_cancel_and_abort_overtake_and_drop_what_they_end() -> None:
    outbox = SendQueue()
    grant = worker_pb2.WorkRequest(grant=worker_pb2.Grant(attempt_id=A))
    for message in (submit(A), submit(B), grant, cancel(A), abort(b"c" * 16)):
        outbox.put(message)
    assert len(outbox) == 3
    assert [await outbox.get() for _ in range(3)] == [cancel(A), abort(b"c" * 16), submit(B)]
    waiting = asyncio.create_task(outbox.get())
    await asyncio.sleep(0)
    outbox.put(submit(A))
    assert await waiting == submit(A)


async def test_attaches_and_carries_messages_both_ways(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No proxy of the environment stands between: it may be another network's, or down."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with linked(worker.identity) as (link, owner):
        link.send(submit(A))
        await owner.was_attached.wait()
        assert (await worker.heard("submit")).attempt_id == A
        worker.delivered(A)
        await until(lambda: owner.messages)
        assert owner.messages[0].delivered.attempt_id == A
        assert link.capacity().max_sequences == 8
        assert link.agent_name == worker.agent_name


async def test_a_submit_that_was_overtaken_shifts_no_count(worker: ScriptedWorker) -> None:
    """The worker never hears of it: its reports know the next one all the same."""
    async with linked(worker.identity) as (link, owner):
        await owner.was_attached.wait()
        for attempt in (A, B):
            link.estimate.reserve(attempt, Reservation(60))
            link.send(submit(attempt))
        link.send(cancel(A))
        link.estimate.release(A)
        assert (await worker.heard("submit")).attempt_id == B
        assert link.capacity().queued_prefill_tokens == 60
        worker.report()
        await until(lambda: link.capacity().queued_prefill_tokens == 0)


async def test_peers_are_remembered_until_a_report_names_others(worker: ScriptedWorker) -> None:
    link = WorkerLink(worker.identity, "r", Owner(), stale_after_s=3.0, attach_timeout_s=60.0)
    attached = worker_pb2.Attached(worker=worker.identity)
    link._receive(worker_pb2.WorkResponse(attached=attached))
    one = [worker_pb2.PeerHealth(agent_name="a", gigabytes_per_s=1.0, cause="slow")]
    for progress, load, named in (
        (1, worker_pb2.Load(peers=one), {"a"}),
        (2, worker_pb2.Load(same_peers=True), {"a"}),
        (3, worker_pb2.Load(), set()),
    ):
        load.progress = progress
        link._receive(worker_pb2.WorkResponse(load=load))
        assert set(link.measured) == set(link.complained_of) == named
    link.end(Loss.CLOSED)


async def test_another_epoch_answers(worker: ScriptedWorker) -> None:
    announced = worker_pb2.WorkerIdentity()
    announced.CopyFrom(worker.identity)
    announced.epoch += 1_000
    async with linked(announced) as (_, owner):
        await until(lambda: owner.losses)
        assert owner.losses == [(Loss.REFUSED, LinkState.CONNECTING)]
        assert not owner.was_attached.is_set()


async def test_nobody_answers() -> None:
    identity = worker_pb2.WorkerIdentity(worker_id="d0", address="127.0.0.1:9")
    async with linked(identity) as (_, owner):
        await until(lambda: owner.losses)
        assert owner.losses[0][1] is LinkState.CONNECTING


async def test_counter_that_stands_still(worker: ScriptedWorker) -> None:
    async with linked(worker.identity, stale_after_s=1.0) as (_, owner):
        await owner.was_attached.wait()
        worker.frozen = True
        await until(lambda: owner.losses)
        assert owner.losses == [(Loss.FROZEN, LinkState.ATTACHED)]
        assert owner.loads >= 2


async def test_long_step_is_waited_for_but_only_once(worker: ScriptedWorker) -> None:
    """An announced step gives time; a report without one takes it back."""
    worker.load.long_step_ms = 60_000
    async with linked(worker.identity, stale_after_s=0.3) as (_, owner):
        await owner.was_attached.wait()
        worker.frozen = True
        await asyncio.sleep(0.7)
        assert owner.losses == []
        worker.frozen = False
        worker.report(long_step_ms=0)
        worker.frozen = True
        await until(lambda: owner.losses)
        assert owner.losses[0][0] is Loss.FROZEN


async def test_a_router_that_stood_still_blames_nobody(worker: ScriptedWorker) -> None:
    """Stopped and woken, or on a machine that was: its clock ran on, and nothing was read."""
    async with linked(worker.identity, stale_after_s=2.0) as (_, owner):
        await owner.was_attached.wait()
        time.sleep(2.5)  # noqa: ASYNC251 - the loop is to stand still
        loads = owner.loads
        await until(lambda: owner.losses or owner.loads > loads + 5)
        assert owner.losses == []


async def test_nothing_is_sent_to_a_lost_worker(worker: ScriptedWorker) -> None:
    async with linked(worker.identity) as (link, owner):
        await owner.was_attached.wait()
        link.end(Loss.CONGESTED)
        link.end(Loss.FROZEN)
        link.send(submit(A))
        assert owner.losses == [(Loss.CONGESTED, LinkState.ATTACHED)]
    assert worker.count("submit") == 0


WORKER_PROCESS = """
import asyncio, pathlib, sys
sys.path[:0] = sys.argv[2:]
from scripted_worker import ScriptedWorker

async def main():
    worker = ScriptedWorker("w0", int(sys.argv[1]))
    worker.load.long_step_ms = 60_000
    await worker.start()
    sys.stdout.buffer.write(worker.identity.SerializeToString().hex().encode() + b"\\n")
    sys.stdout.flush()
    await asyncio.sleep(60)

asyncio.run(main())
"""


@asynccontextmanager
async def worker_process(
    role: int = DECODE,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, worker_pb2.WorkerIdentity]]:
    """In a step that it has announced to take a minute."""
    command = [sys.executable, "-c", WORKER_PROCESS, str(role), *filter(None, sys.path)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "it ended before it served"
    try:
        yield process, worker_pb2.WorkerIdentity.FromString(bytes.fromhex(line.decode()))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_killed_process_is_provably_gone() -> None:
    async with worker_process() as (process, identity), linked(identity) as (_, owner):
        await owner.was_attached.wait()
        process.send_signal(signal.SIGKILL)
        await until(lambda: owner.losses)
        loss = owner.losses[0][0]
        assert loss is Loss.SOCKET_CLOSED
        assert await process_is_gone(identity.address, loss)


async def test_stopped_process_is_not_gone() -> None:
    """Keepalive loses the connection of a process that will wake and write, whatever time its step
    was announced to take."""
    async with worker_process() as (process, identity), linked(identity) as (_, owner):
        await owner.was_attached.wait()
        process.send_signal(signal.SIGSTOP)
        await until(lambda: owner.losses)
        loss = owner.losses[0][0]
        assert loss is Loss.STREAM_ENDED
        assert not await process_is_gone(identity.address, loss)


async def test_a_dying_process_listens_a_little_longer() -> None:
    """The kernel closes its sockets one after the other, and the one it listens on comes last."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        asked = asyncio.create_task(process_is_gone(address, Loss.SOCKET_CLOSED))
        await asyncio.sleep(0.1)
        assert not asked.done()
    assert await asked


async def test_who_listens_and_says_nothing_may_be_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.deaths.probe._PROBE_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert not await process_is_gone(address, Loss.SOCKET_CLOSED)


async def test_proof_needs_all_of_its_parts(worker: ScriptedWorker) -> None:
    assert not await process_is_gone(worker.identity.address, Loss.SOCKET_CLOSED)  # it listens
    assert not await process_is_gone("127.0.0.1:9", Loss.STREAM_ENDED)  # a goodbye is no death
    assert not await process_is_gone("127.0.0.1:9", Loss.FROZEN)
    assert not await process_is_gone("192.0.2.1:9", Loss.SOCKET_CLOSED)  # another host
    assert await process_is_gone("127.0.0.1:9", Loss.SOCKET_CLOSED)
