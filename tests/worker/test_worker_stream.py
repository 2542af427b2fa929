"""The Work stream over a real gRPC server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from worker_kit import DECODE, PREFILL, WAIT_S, WHOLE, Attempted, Node, a_pair, until

from baton.grpc_options import channel_options, server_options
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from faults import failpoints
from kv_transfer.transports.processes import own_process
from serving.release import PROTOCOL, stamp
from worker.load import PrefillRoom, Report, load_message
from worker.stream import WorkerServicer


@pytest.fixture
def path_cut() -> Iterator[None]:
    """The test cuts the path by a failpoint; here it is mended."""
    yield
    failpoints.arm("")


class RouterEnd:
    """A router's end of one Work stream."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        self.call = worker_pb2_grpc.WorkerServiceStub(self._channel).Work()
        self.history: list[tuple[str, Any]] = []

    async def attach(self, router_id: str = "router") -> worker_pb2.Attached:
        await self.say(attach=stamp(worker_pb2.Attach(router_id=router_id)))
        return await self.heard("attached")

    async def say(self, **message: Any) -> None:
        await self.call.write(worker_pb2.WorkRequest(**message))

    async def heard(self, kind: str) -> Any:
        """Reads on to the next message of that kind."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self.call.read()
                assert message is not grpc.aio.EOF, f"the stream ended before {kind}"
                name = message.WhichOneof("message")
                self.history.append((name, getattr(message, name)))
                if name == kind:
                    return self.history[-1][1]

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


class Served:
    """A node behind a real server."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.servicer = WorkerServicer(node.identity, node.services, self.report)
        node.send_to_routers = self.servicer.send_to_routers
        self.address = ""

    def report(self) -> Report:
        load = self.node.engine.load()
        room = PrefillRoom(load.queued_prefill_tokens, 0, 16, 4)
        return Report(load_message(load, room, draining=self.servicer.draining), load.requests)


@asynccontextmanager
async def served(node: Node) -> AsyncIterator[Served]:
    worker = Served(node)
    server = grpc.aio.server(options=server_options())
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker.servicer, server)
    worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    reporter = asyncio.create_task(worker.servicer.report_forever())
    try:
        yield worker
    finally:
        reporter.cancel()
        await server.stop(None)


async def test_attaches_and_reports_load_at_once_and_again() -> None:
    async with a_pair() as pair, served(pair.d) as worker:
        router = RouterEnd(worker.address)
        attached = await router.attach()
        assert attached.worker == pair.d.identity
        first = await router.heard("load")
        assert first.total_pages == pair.d.all_pages
        began_s = asyncio.get_running_loop().time()
        seen = {first.progress}
        while len(seen) < 4:
            seen.add((await router.heard("load")).progress)
        assert asyncio.get_running_loop().time() - began_s < 5, "an idle loop counts on"
        await router.close()


async def test_what_breaks_one_duty_is_logged_once_and_leaves_the_reports_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_pair() as pair:
        tried: list[None] = []

        def breaks() -> None:
            tried.append(None)
            raise RuntimeError

        monkeypatch.setattr(pair.d.prefill, "expire", breaks)
        async with served(pair.d) as worker:
            router = RouterEnd(worker.address)
            await router.attach()
            seen = set()
            while len(seen) < 3:
                seen.add((await router.heard("load")).progress)
            await router.close()
        assert len(tried) > 1
        assert [one.message for one in caplog.records if one.exc_info] == ["a duty failed"]


async def test_a_router_that_never_attaches_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("worker.stream.ATTACH_TIMEOUT_S", 0.05)
    async with a_pair() as pair, served(pair.d) as worker:
        router = RouterEnd(worker.address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.heard("attached")
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await router.close()


async def test_a_router_of_another_release_is_refused() -> None:
    async with a_pair() as pair, served(pair.d) as worker:
        router = RouterEnd(worker.address)
        foreign = worker_pb2.Attach(router_id="old", release="0.0.1", protocol="elsewhere")
        await router.say(attach=foreign)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.heard("attached")
        await router.close()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "router old is of another release of Baton (0.0.1" in (caught.value.details() or "")


async def test_a_router_that_is_a_minor_number_ahead_is_served_and_its_news_ignored() -> None:
    """A message of a kind that this release has not, and a new field in one that it has."""
    async with a_pair() as pair, served(pair.d) as worker:
        router = RouterEnd(worker.address)
        newer = f"{PROTOCOL.major}.{PROTOCOL.minor + 1}"
        attach = worker_pb2.Attach(router_id="new", release="9.0.0", protocol=newer)
        attach.MergeFromString(b"\xa2\x06\x03new")  # field 100
        await router.say(attach=attach)
        await router.heard("attached")
        await router.call.write(worker_pb2.WorkRequest.FromString(b"\xa2\x06\x03new"))
        await router.heard("load")
        await router.heard("load")
        await router.close()


@pytest.mark.parametrize(
    ("protocol", "reason"),
    [
        ("1.1", worker_pb2.FAILURE_REASON_STRUCTURE),
        (str(PROTOCOL), worker_pb2.FAILURE_REASON_NO_TOKEN),
    ],
)
async def test_a_router_hears_of_reasons_that_it_knows(protocol: str, reason: int) -> None:
    """Routers of 0.2.0 gave a worker up that named another one."""
    async with a_pair() as pair, served(pair.d) as worker:
        router = RouterEnd(worker.address)
        await router.say(attach=worker_pb2.Attach(router_id="router", protocol=protocol))
        submit = Attempted(20).message(WHOLE)
        submit.sampling.allowed_token_ids.append(5)
        submit.sampling.bad_words.append(np.array([5], "<u4").tobytes())
        await router.say(submit=submit)
        assert (await router.heard("failed")).reason == reason
        await router.close()


async def test_the_first_message_is_attach() -> None:
    async with a_pair() as pair, served(pair.d) as worker:
        router = RouterEnd(worker.address)
        await router.say(cancel=worker_pb2.Cancel(attempt_id=b"a"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.heard("attached")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await router.close()


async def test_a_hand_off_over_two_streams() -> None:
    async with a_pair() as pair, served(pair.p) as p, served(pair.d) as d:
        to_p, to_d = RouterEnd(p.address), RouterEnd(d.address)
        await to_p.attach()
        await to_d.attach()
        attempt = Attempted(40, max_tokens=12)
        await to_d.say(submit=attempt.message(DECODE, pair.p.name))
        await to_p.say(submit=attempt.message(PREFILL, pair.d.name))
        await to_p.say(grant=await to_d.heard("granted"))
        first = await to_p.heard("first_token")
        assert [record.token_id for record in first.records] == attempt.expected[:1]
        finished = await to_d.heard("finished")
        assert finished.output_tokens == 12
        output = b"".join(m.token_ids for kind, m in to_d.history if kind == "tokens")
        assert list(memoryview(output).cast("I")) == attempt.expected
        await to_p.heard("prefill_done")
        await pair.quiet()
        await to_p.close()
        await to_d.close()


@pytest.mark.parametrize("broken", ["p", "d", "both"])
async def test_a_stream_that_breaks_ends_what_it_carried(broken: str) -> None:
    async with a_pair() as pair, served(pair.p) as p, served(pair.d) as d:
        to_p, to_d, other = RouterEnd(p.address), RouterEnd(d.address), RouterEnd(d.address)
        for router in (to_p, to_d, other):
            await router.attach()
        pair.p.transport.holds = True
        attempt, kept = Attempted(40), Attempted(20)
        await to_d.say(submit=attempt.message(DECODE, pair.p.name))
        await to_p.say(submit=attempt.message(PREFILL, pair.d.name))
        await to_p.say(grant=await to_d.heard("granted"))
        await until(lambda: pair.p.transport.held_pushes)
        await other.say(submit=kept.message(WHOLE))
        await other.heard("finished")
        if broken in ("p", "both"):
            await to_p.close()
        if broken in ("d", "both"):
            await to_d.close()
            await until(lambda: pair.d.decode.stats.quarantined == 1)
        pair.p.transport.holds = False
        if broken == "p":
            await to_d.say(abort=worker_pb2.Abort(attempt_id=attempt.id))
            delivered = (await to_d.heard("aborted")).already_ready
            if delivered and "finished" not in dict(to_d.history):
                await to_d.heard("finished")
        await pair.quiet()
        for router in (to_p, to_d, other):
            await router.close()


async def test_a_quarantine_ends_over_the_routers_where_the_direct_path_is_cut(
    path_cut: None,
) -> None:
    """The prefill worker answers once what it has posted has landed, and not before."""
    async with a_pair() as pair, served(pair.p) as p, served(pair.d) as d:
        to_p, to_d = RouterEnd(p.address), RouterEnd(d.address)
        await to_p.attach()
        await to_d.attach()
        pair.p.transport.holds = pair.p.executor.holds = True
        attempt = Attempted(40)
        await to_d.say(submit=attempt.message(DECODE, pair.p.name))
        await to_p.say(submit=attempt.message(PREFILL, pair.d.name))
        await to_p.say(grant=await to_d.heard("granted"))
        await until(lambda: pair.p.executor.held)
        pair.p.executor.step()
        await until(lambda: pair.p.transport.held_pushes)
        failpoints.arm("transfer.path=raise")
        await to_d.say(abort=worker_pb2.Abort(attempt_id=attempt.id))
        assert not (await to_d.heard("aborted")).already_ready
        question = await to_d.heard("quiesce_wanted")
        assert list(question.prefill_processes) == [own_process()]
        await to_p.say(quiesce=question)
        await to_p.say(quiesce=await to_d.heard("quiesce_wanted"))
        assert pair.d.decode.stats.quarantined == 1
        assert "quiesced" not in dict(to_p.history)
        pair.p.transport.holds = False
        pair.p.executor.let_go()
        await until(lambda: not pair.p.prefill.stats.active)
        await to_p.say(quiesce=await to_d.heard("quiesce_wanted"))
        await to_d.say(quiesced=await to_p.heard("quiesced"))
        await pair.quiet()
        await to_p.close()
        await to_d.close()


async def test_two_routers_hear_of_their_own_only() -> None:
    async with a_pair() as pair, served(pair.d) as worker:
        one, two = RouterEnd(worker.address), RouterEnd(worker.address)
        await one.attach("one")
        await two.attach("two")
        await until(lambda: worker.servicer.streams == 2)  # A moment after it says so.
        first, second = Attempted(20), Attempted(30)
        await one.say(submit=first.message(WHOLE))
        await two.say(submit=second.message(WHOLE))
        for router, attempt in ((one, first), (two, second)):
            assert (await router.heard("finished")).attempt_id == attempt.id
            for kind, message in router.history:
                if kind == "tokens":
                    assert set(message.attempt_ids) == {attempt.id}
            await router.close()
        await until(lambda: worker.servicer.streams == 0)
        await pair.quiet()


async def test_an_unknown_peer_and_one_of_another_model_are_refused() -> None:
    async with a_pair() as pair, served(pair.d) as worker:
        router = RouterEnd(worker.address)
        await router.attach()
        stranger = worker_pb2.WorkerIdentity()
        stranger.CopyFrom(pair.p.identity)
        stranger.model.fingerprint = "another"
        stranger.endpoint.agent_name = "stranger"
        await router.say(meet=worker_pb2.Meet(worker=stranger))
        for mode, peer in ((DECODE, "stranger"), (DECODE, ""), (PREFILL, "nobody")):
            attempt = Attempted(8)
            await router.say(submit=attempt.message(mode, peer))
            failed = await router.heard("failed")
            assert failed.attempt_id == attempt.id
            assert failed.reason == worker_pb2.FAILURE_REASON_BAD_PEER
        await router.say(part=worker_pb2.Part(agent_name=pair.p.name, proven_dead=True))
        await router.say(submit=Attempted(8).message(DECODE, pair.p.name))
        assert (await router.heard("failed")).reason == worker_pb2.FAILURE_REASON_BAD_PEER
        await router.close()
        await pair.quiet()


async def test_draining_refuses_new_work_and_finishes_the_rest() -> None:
    async with a_pair() as pair, served(pair.d) as worker:
        router = RouterEnd(worker.address)
        await router.attach()
        pair.d.executor.holds = True
        running, late = Attempted(20), Attempted(20)
        await router.say(submit=running.message(WHOLE))
        await until(lambda: pair.d.executor.held)
        worker.servicer.draining = True
        await router.say(submit=late.message(WHOLE))
        failed = await router.heard("failed")
        assert failed.attempt_id == late.id
        assert failed.reason == worker_pb2.FAILURE_REASON_DRAINING
        while not (await router.heard("load")).draining:
            pass
        pair.d.executor.let_go()
        assert (await router.heard("finished")).attempt_id == running.id
        worker.servicer.finish()
        async with asyncio.timeout(WAIT_S):
            while await router.call.read() is not grpc.aio.EOF:
                pass
        assert await router.call.code() is grpc.StatusCode.OK
        await router.close()
        await pair.quiet()


async def test_malformed_work_fails_and_the_stream_lives_on() -> None:
    async with a_pair() as pair, served(pair.d) as worker:
        router = RouterEnd(worker.address)
        await router.attach()
        bad = Attempted(8).message(WHOLE)
        bad.prompt_ids = b"x"
        await router.say(submit=bad)
        assert (await router.heard("failed")).reason == worker_pb2.FAILURE_REASON_INTERNAL
        await router.say(submit=Attempted(8).message(WHOLE))
        await router.heard("finished")
        await router.close()
        await pair.quiet()
