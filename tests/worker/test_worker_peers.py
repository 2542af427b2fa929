"""Who may be exchanged pages with."""

from __future__ import annotations

import logging

import pytest

from baton.worker.v1 import worker_pb2
from kv_transfer.events import PeerFailed, PeerOpened
from kv_transfer.types import Endpoint
from worker.peers import ALONE_S, FIRST_RETRY_S, PeerPaths


class Recorder:
    """A transfer thread that only listens."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def meet(self, peer: Endpoint) -> None:
        self.calls.append(("meet", peer.agent_name))

    def part(self, agent_name: str, proven_dead: bool) -> None:
        self.calls.append(("part", agent_name, proven_dead))


def worker(name: str, fingerprint: str = "f") -> worker_pb2.WorkerIdentity:
    return worker_pb2.WorkerIdentity(
        worker_id=name,
        model=worker_pb2.ModelInfo(fingerprint=fingerprint),
        endpoint=worker_pb2.KvEndpoint(agent_name=name, transport="loopback"),
    )


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.heard = Recorder()
        self.peers = PeerPaths(
            worker("me"), self.heard, lambda: self.now_s, slow_gigabytes_per_s=1.0
        )


def test_a_peer_is_usable_from_the_meeting_on() -> None:
    world = World()
    assert not world.peers.is_usable("other")
    world.peers.meet(worker("other"), "router")
    assert world.peers.is_usable("other")
    world.peers.on_transfer(PeerOpened("other", "nixl/shm", 3.0))
    assert world.peers.path_to("other") == "nixl/shm"
    world.peers.meet(worker("other"), "second router")
    assert world.heard.calls == [("meet", "other")]


def test_no_speed_is_logged_before_it_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker.peers")
    world = World()
    world.peers.meet(worker("other"), "router")
    for gigabytes_per_s in (0.0, 1.5):
        world.peers.on_transfer(PeerOpened("other", "nixl/shm", gigabytes_per_s, 90.0))
    world.peers.on_transfer(PeerFailed("other", "unreachable"))
    world.peers.on_transfer(PeerOpened("other", "nixl/shm", 1.5, 90.0))
    told = [(r.message, vars(r).get("gigabytes_per_s")) for r in caplog.records]
    assert told == [
        ("peer open", None),
        ("peer measured", 1.5),
        ("peer failed", None),
        ("peer open", 1.5),
    ]


def test_a_slow_path_is_reported_with_its_reason_and_used_all_the_same() -> None:
    world = World()
    world.peers.meet(worker("other"), "router")
    (health,) = world.peers.health()
    assert (health.cause, health.gigabytes_per_s) == ("", 0), "not measured yet: no complaint"
    world.peers.on_transfer(PeerOpened("other", "nixl/tcp", 0.4, 900.0))
    (health,) = world.peers.health()
    assert (health.agent_name, health.transport, health.cause) == (
        "other",
        "nixl/tcp",
        "slow_tcp_only",
    )
    assert world.peers.is_usable("other")
    assert [path.cause for path in world.peers.paths()] == ["slow_tcp_only"]
    world.peers.on_transfer(PeerOpened("other", "nixl/shm", 1.5, 90.0))
    assert [path.cause for path in world.peers.paths()] == [""]


def test_a_broken_path_is_reported_until_it_is_open_again() -> None:
    world = World()
    world.peers.meet(worker("other"), "router")
    world.peers.on_transfer(PeerFailed("other", "unreachable"))
    assert [health.cause for health in world.peers.health()] == ["unreachable"]
    world.peers.on_transfer(PeerOpened("other", "nixl/shm", 0.0))
    assert [health.cause for health in world.peers.health()] == [""]


def test_a_different_fingerprint_is_never_opened() -> None:
    world = World()
    world.peers.meet(worker("other", fingerprint="g"), "router")
    world.now_s += 100
    world.peers.tick()
    assert not world.peers.is_usable("other")
    world.peers.part("other", False, "router")
    assert world.heard.calls == []


def test_this_worker_is_no_peer_of_itself_and_one_without_a_pool_is_none() -> None:
    world = World()
    world.peers.meet(worker("me"), "router")
    world.peers.meet(worker(""), "router")
    assert world.heard.calls == []


def test_a_failed_peer_is_tried_again_with_back_off() -> None:
    world = World()
    world.peers.meet(worker("other"), "router")
    for wait_s in (FIRST_RETRY_S, 2 * FIRST_RETRY_S):
        world.peers.on_transfer(PeerFailed("other", "unreachable"))
        assert not world.peers.is_usable("other")
        world.now_s += 0.9 * wait_s
        world.peers.tick()
        assert not world.peers.is_usable("other")
        world.now_s += 0.2 * wait_s
        world.peers.tick()
        assert world.peers.is_usable("other")
    assert world.heard.calls == [("meet", "other")] * 3


def test_a_peer_leaves_with_the_last_router_that_knows_it() -> None:
    world = World()
    world.peers.meet(worker("other"), "a")
    world.peers.meet(worker("other"), "b")
    world.peers.part("other", False, "a")
    assert world.peers.is_usable("other")
    world.peers.part("other", False, "b")
    assert not world.peers.is_usable("other")
    assert world.heard.calls[1:] == [("part", "other", False)]


def test_a_proven_death_counts_whoever_says_so() -> None:
    world = World()
    world.peers.meet(worker("other"), "a")
    world.peers.meet(worker("other"), "b")
    world.peers.part("other", True, "a")
    assert not world.peers.is_usable("other")
    world.peers.part("other", True, "b")
    assert world.heard.calls[1:] == [("part", "other", True)] * 2


def test_a_router_that_is_gone_takes_no_peer_with_it() -> None:
    world = World()
    world.peers.meet(worker("other"), "a")
    world.peers.end_stream("a")
    assert world.peers.is_usable("other")
    world.peers.on_transfer(PeerFailed("other", "push_error"))
    world.now_s += 0.9 * ALONE_S
    world.peers.tick()
    assert not world.peers.is_usable("other"), "nobody wants it any more"


def test_a_peer_that_no_router_comes_back_for_is_let_go() -> None:
    """It may have died while the only router that knew it was away."""
    world = World()
    world.peers.meet(worker("gone"), "a")
    world.peers.meet(worker("here"), "a")
    world.peers.end_stream("a")
    world.now_s += 0.9 * ALONE_S
    world.peers.meet(worker("here"), "a again")
    world.peers.end_stream("somebody else")
    world.now_s += 0.2 * ALONE_S
    world.peers.tick()
    assert [health.agent_name for health in world.peers.health()] == ["here"]
    assert world.heard.calls[2:] == [("part", "gone", False)]
