"""Who may open a stream to the leader, and how long each side waits for the other."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from settings_kit import settings_of

from baton.version import __version__
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from serving.gpu_slots import claimed
from serving.net.certificates import write_set
from serving.net.internal_net import TlsNet, server_name_of, workers_net
from serving.net.refusals import FIRST_CALL_S
from worker.hosts import agent as agent_module
from worker.hosts import leader as leader_module
from worker.hosts.agent import Agent, GroupEndedError
from worker.hosts.guard import Guard
from worker.hosts.leader import Group
from worker.hosts.place import FORM_S, Place
from worker.settings import WorkerSettings

HOME = "127.0.0.1"
NAME = "prefill-0"
NODES = 2
MEMBER = worker_pb2.GroupMember(
    worker_id=NAME, node=1, nodes=NODES, tp=2, pp=1, release=__version__, model_digest=b"d"
)


class Door:
    """A leader, and streams to it. All end with the block."""

    def __init__(self, folder: Path) -> None:
        write_set(folder, ("prefill", "decode"), (), days=30)
        self._folder = folder
        self._over, self._stack = threading.Event(), ExitStack()
        place = Place(NODES, 0, f"{HOME}:0", HOME, HOME, "lo")
        self.net = net = self._net("prefill", NAME)
        self._shown = server_name_of(net.rotating.certificate.names, NAME)
        self._address, bind = "", net.bind

        def bound(server: Any, address: str) -> str:
            self._address = bind(server, address)
            return self._address

        cast("Any", net).bind = bound
        settings = settings_of(WorkerSettings, name=NAME, tp=2, nodes=NODES, node=0)
        self.group = Group(settings, place, net, b"d", Guard(-1))

    def open(self, pool: str, *messages: worker_pb2.JoinRequest) -> Any:
        """A stream of one with a certificate of a pool, which then says nothing more."""
        net = self._net(pool, f"{pool}-0")
        channel = net.open(self._address, self._shown, [("grpc.use_local_subchannel_pool", 1)])
        self._stack.enter_context(channel)

        def said() -> Iterator[worker_pb2.JoinRequest]:
            yield from messages
            self._over.wait()

        return worker_pb2_grpc.GroupServiceStub(channel).Join(said())

    def close(self) -> None:
        """Ends all."""
        self._over.set()
        self._stack.close()
        self.group.close()

    def _net(self, pool: str, name: str) -> TlsNet:
        tls = str(self._folder / pool)
        net = workers_net(settings_of(WorkerSettings, tls_dir=tls).tls, name)
        assert isinstance(net, TlsNet)
        return net


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(leader_module, "FIRST_WORD_S", 0.5)
    made = Door(tmp_path)
    yield made
    made.close()


def test_a_foreign_certificate_is_refused_before_it_says_a_word(door: Door) -> None:
    with pytest.raises(grpc.RpcError) as found:
        next(door.open("decode"))
    error: Any = found.value
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "its certificate is not of that name" in error.details()


def test_silent_streams_keep_no_agent_out(door: Door) -> None:
    """As many as the leader has threads, each of a channel of its own."""
    silent = [door.open("prefill") for _ in range(2 * NODES + 2)]
    agent = door.open("prefill", worker_pb2.JoinRequest(member=MEMBER))
    door.group.form(10)
    assert agent.is_active()
    for stream in silent:
        with pytest.raises(grpc.RpcError) as found:
            next(stream)
        error: Any = found.value
        assert error.code() is grpc.StatusCode.CANCELLED


def test_an_agent_that_joins_is_none_without_a_certificate(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its stream no other call comes."""
    agent = door.open("prefill", worker_pb2.JoinRequest(member=MEMBER))
    door.group.form(10)
    refusals, later_s = door.net.refusals, time.monotonic() + 2 * FIRST_CALL_S
    monkeypatch.setattr(refusals, "_clock", lambda: later_s)
    refusals.look()
    assert agent.is_active()
    assert not any(refusals.counts.values())


def agent_of(folder: Path, **changed: Any) -> WorkerSettings:
    """Settings of node 1, with certificates."""
    write_set(folder, ("prefill",), (), days=30)
    own = {"name": NAME, "tp": 2, "nodes": NODES, "node": 1, "model": str(folder)}
    return settings_of(WorkerSettings, tls_dir=str(folder / "prefill"), **own | changed)


def test_an_agent_without_a_leader_ends_when_it_is_told_to(tmp_path: Path) -> None:
    """And waits for none any more: its tries are refused at once, one after the other."""
    settings = agent_of(tmp_path)
    with socket.create_server((HOME, 0)) as door:
        nobody = f"{HOME}:{door.getsockname()[1]}"
    net = workers_net(settings.tls, NAME)
    agent = Agent(settings, Place(NODES, 1, nobody, "", HOME, "lo"), net, Guard(-1))
    threading.Timer(0.5, agent.leave).start()
    began_s = time.monotonic()
    assert agent.run() == 1
    assert time.monotonic() - began_s < FORM_S / 4


@pytest.mark.parametrize("at", ["write_ends", "start"])
def test_an_agent_told_to_end_while_its_ranks_start_says_so_once(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal comes before it has ranks, or just after. The leader would end at once if it heard
    of two."""
    settings = agent_of(tmp_path)
    net = workers_net(settings.tls, NAME)
    agent = Agent(settings, Place(NODES, 1, f"{HOME}:1", "", HOME, "lo"), net, Guard(-1))
    for owner, step in ((agent_module, "write_ends"), (agent_module.RankProcesses, "start")):
        taken = agent.leave if step == at else lambda: None
        monkeypatch.setattr(owner, step, lambda *_, taken=taken: taken())
    monkeypatch.setattr(agent_module, "LOOK_MS", 10)
    said = list[str | None]()

    def hear() -> None:
        for _ in range(5):
            message = agent._outbox.get()
            said.append(message and message.WhichOneof("message"))
        agent._inbox.put(worker_pb2.JoinResponse(stop=worker_pb2.StopRanks(reason="enough")))

    agent._inbox.put(worker_pb2.JoinResponse(order=worker_pb2.GroupOrder(config="{}")))
    threading.Thread(target=hear, daemon=True).start()
    with pytest.raises(GroupEndedError, match="enough"):
        agent._keep()
    assert said.count("leaves") == 1


def test_an_agent_claims_the_gpus_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of the host's two is another worker's, and each host has a rank."""
    for name in ("setup_logging", "keep_data_plane_on"):
        monkeypatch.setattr(agent_module, name, lambda *_: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    chosen: list[str] = []

    def begin(*_: object) -> None:
        chosen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise OSError("enough")

    monkeypatch.setattr(agent_module, "Agent", begin)
    settings = agent_of(tmp_path, device="cuda", gpu_slots_dir=str(tmp_path), routers="lo:1")
    place = Place(NODES, 1, f"{HOME}:1", "", HOME, "lo")
    with claimed(tmp_path, ["6"], "other"):
        assert agent_module._run(settings, place, Guard(-1)) == 1
        with claimed(tmp_path, ["7"], "another"):
            assert agent_module._run(settings, place, Guard(-1)) == 1
    assert chosen == ["7"]
    assert "no GPU is left here for prefill-0: claimed are" in caplog.text
