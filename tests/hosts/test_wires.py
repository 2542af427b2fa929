"""The sockets between rank 0 and ranks of other hosts: who may connect, what a capture shows."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from engine.eager.collective import GlooCollective
from engine.eager.meeting import Meeting
from engine.hosts.control import Control
from engine.hosts.lifeline import LIFELINE, SILENT_S
from engine.hosts.meetings import RankMeetings
from engine.hosts.others import Heard, Order
from engine.hosts.wires import Ends, Keys, write_ends

HOME = "127.0.0.1"
SECRET = b"prompt ids of nobody's business"


class Hosts:
    """The agents of one other host, which starts nothing."""

    nodes = 2
    address = fabric = HOME
    interface = "lo"

    def __init__(self) -> None:
        self.keys, self.theirs = Keys.new(), Keys.new()
        self.order: Order | None = None
        self.stopped: list[str] = []

    @property
    def known(self) -> list[str]:
        return [self.keys.public, self.theirs.public]

    def keeps(self, pids: Collection[int]) -> None:
        self.kept = list(pids)

    def begin(self, order: Order, heard: Heard) -> None:
        self.order = order

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


@pytest.fixture
def control(tmp_path: Path, hosts: Hosts) -> Iterator[Control]:
    made = Control(tmp_path, hosts)
    made.open()
    yield made
    made.close()


def ends_of(control: Control, hosts: Hosts, folder: Path, keys: Keys | None = None) -> Ends:
    """Those of the other host."""
    control.begin_elsewhere("{}", Heard(*[lambda *_: None] * 3))
    assert hosts.order is not None
    folder.mkdir(exist_ok=True)
    order = hosts.order
    write_ends(folder, order.addresses, order.server, keys or hosts.theirs, HOME, "lo")
    return Ends(folder)


def exchanged(mine: Any, ends: Ends, context: Any) -> bytes | None:
    theirs = context.socket(zmq.PAIR)
    ends.connect(theirs, "steps-1")
    theirs.send(b"hello")
    if not mine.poll(500):
        return None
    mine.recv()
    mine.send_multipart([b"step", SECRET])
    return theirs.recv_multipart()[1]


def test_ranks_of_this_start_alone_may_connect(
    control: Control, hosts: Hosts, tmp_path: Path
) -> None:
    context = zmq.Context()
    context.linger = 0
    mine = control.bound(zmq.PAIR, "steps-1")
    stranger = ends_of(control, hosts, tmp_path / "c", Keys.new())
    assert exchanged(mine, stranger, context) is None
    assert exchanged(mine, ends_of(control, hosts, tmp_path / "b"), context) == SECRET
    plain = context.socket(zmq.PAIR)
    assert hosts.order is not None
    plain.connect(hosts.order.addresses["steps-1"])
    plain.send(b"hello")
    assert not mine.poll(300)
    context.destroy(linger=0)
    assert (tmp_path / "b" / "wires.json").stat().st_mode & 0o077 == 0


def test_nobody_may_connect_once_the_authenticator_has_ended(
    control: Control, hosts: Hosts, tmp_path: Path
) -> None:
    context = zmq.Context()
    context.linger = 0
    mine = control.bound(zmq.PAIR, "steps-1")
    control._wires.close()
    for number, keys in enumerate((Keys.new(), hosts.theirs)):
        ends = ends_of(control, hosts, tmp_path / str(number), keys)
        assert exchanged(mine, ends, context) is None
    context.destroy(linger=0)


def test_beats_wait_for_nothing_large(control: Control, hosts: Hosts, tmp_path: Path) -> None:
    """They are encrypted and written by a thread of their own."""
    context = zmq.Context(2)
    mine = control.bound(zmq.PAIR, "steps-1")
    ends = ends_of(control, hosts, tmp_path / "b")
    theirs, beats = context.socket(zmq.PAIR), context.socket(zmq.SUB)
    theirs.affinity, beats.affinity = 1, 2
    beats.subscribe(b"")
    ends.connect(theirs, "steps-1")
    ends.connect(beats, LIFELINE)
    theirs.send(b"hello")
    mine.recv()
    assert control.beat is not None
    while not beats.poll(50):
        control.beat()
    while beats.poll(50):
        beats.recv()
    mine.send(bytes(64 << 20))
    sent_s, late_s = time.process_time(), 0.0  # Stands still where the machine does.
    while not theirs.poll(0):
        began_s = time.process_time()
        control.beat()
        beats.recv()
        late_s = max(late_s, time.process_time() - began_s)
    whole_s = time.process_time() - sent_s
    assert late_s < whole_s / 5, "behind it, a beat takes a third of the time and more"
    context.destroy(linger=0)


def test_nothing_is_readable_on_the_way(control: Control, hosts: Hosts, tmp_path: Path) -> None:
    """A relay between the two, which keeps every byte."""
    context, seen = zmq.Context(), bytearray()
    context.linger = 0
    mine = control.bound(zmq.PAIR, "steps-1")
    ends_of(control, hosts, tmp_path / "b")
    assert hosts.order is not None
    door = socket.create_server((HOME, 0))
    told = {**hosts.order.addresses, "steps-1": f"tcp://{HOME}:{door.getsockname()[1]}"}
    write_ends(tmp_path / "b", told, hosts.order.server, hosts.theirs, HOME, "lo")

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        while content := source.recv(65536):
            seen.extend(content)
            target.sendall(content)

    def relay() -> None:
        near, _ = door.accept()
        far = socket.create_connection(
            (HOME, int(hosts.order.addresses["steps-1"].rpartition(":")[2]))
        )
        for pair in ((near, far), (far, near)):
            threading.Thread(target=pass_on, args=pair, daemon=True).start()

    threading.Thread(target=relay, daemon=True).start()
    assert exchanged(mine, Ends(tmp_path / "b"), context) == SECRET
    assert len(seen) > 2 * len(SECRET)
    assert SECRET not in seen
    context.destroy(linger=0)


def test_ranks_meet_over_the_wires(control: Control, hosts: Hosts, tmp_path: Path) -> None:
    control.tell_ranks_here()
    ends_of(control, hosts, tmp_path / "b")
    meetings = [RankMeetings(folder, 2, 2) for folder in (tmp_path, tmp_path / "b")]
    word, sums = secrets.token_hex(4), [torch.full((3,), float(rank + 1)) for rank in range(2)]

    def run(rank: int) -> None:
        meeting = meetings[rank](f"stage-{word}", [0, 1])
        assert isinstance(meeting, Meeting)
        group = GlooCollective(rank, 2)
        group.join(meeting)
        group.all_reduce(sums[rank])

    other = threading.Thread(target=run, args=(1,), daemon=True)
    other.start()
    run(0)
    other.join(30)
    for one in meetings:
        one.close()
    assert [one.tolist() for one in sums] == [[3.0] * 3] * 2


def test_the_store_has_what_torch_asks_for(control: Control, hosts: Hosts, tmp_path: Path) -> None:
    ends_of(control, hosts, tmp_path / "b")
    meetings = RankMeetings(tmp_path / "b", 2, 2)
    store = meetings._store
    assert store is not None
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    assert not store.check(["n", "k"])
    late = threading.Timer(0.2, lambda: store.set("k", b"v"))
    late.start()
    store.wait(["n", "k"])
    assert (store.get("k"), store.check(["n", "k"])) == (b"v", True)
    late.join()
    meetings.close()


def test_a_lifeline_is_shorter_than_what_is_promised() -> None:
    """A group is lost within four seconds, in which its ranks are killed, too."""
    assert SILENT_S <= 3
