"""Pages through staging buffers of every size and number, gathered, sent, scattered in segments."""

from __future__ import annotations

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from kv_world import NUM_PAGES, PAGE_BYTES, PAGE_TOKENS, World, a_world
from waiting import WAIT_S, wait_until

from kv_transfer.events import Delivered, Sent
from kv_transfer.nccl import wire as channel_wire
from kv_transfer.nccl.channels import Channel, ReceiveChannel, SendChannel
from kv_transfer.nccl.staging import ChannelOptions, Staging
from kv_transfer.nccl.transport import NcclTransport
from kv_transfer.nccl.wire import KEY_BYTES, Push, Wire
from kv_transfer.transports.factory import TRANSPORTS
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import Notification, PageGroup, PushState, TransportError


@pytest.mark.parametrize(
    "options",
    [
        ChannelOptions(segment_bytes=1, slots=1),
        ChannelOptions(segment_bytes=3 * PAGE_BYTES + 1, slots=1),
        ChannelOptions(segment_bytes=5 * PAGE_BYTES, slots=2),
        ChannelOptions(segment_bytes=NUM_PAGES * PAGE_BYTES, slots=3),
    ],
)
def test_every_piece_arrives_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch, options: ChannelOptions
) -> None:
    monkeypatch.setitem(TRANSPORTS, "nccl", partial(NcclTransport, options=options))
    with a_world("nccl") as world:
        for num_pages in (1, 14, NUM_PAGES - 1):
            send(world, num_pages)


def send(world: World, num_pages: int) -> None:
    before = len(world.decode.of(Delivered))
    world.decode.pool.ranks[0].zero_()
    transfer = world.sent(num_pages * PAGE_TOKENS)
    world.until(lambda: len(world.decode.of(Delivered)) == before + 1)
    world.until(lambda: len(world.prefill.of(Sent)) == before + 1)
    transfer.assert_delivered()
    written = world.decode.pool.ranks[0].view(-1, PAGE_BYTES).any(dim=1).sum()
    assert written == num_pages, "pages were written that nobody granted"


@pytest.mark.parametrize("segment_bytes", [1, PAGE_BYTES - 1, PAGE_BYTES, 5 * PAGE_BYTES + 1])
def test_what_a_buffer_holds_bounds_all_pieces(segment_bytes: int) -> None:
    pool = PoolMemory.of(torch.zeros(32, PAGE_BYTES, dtype=torch.uint8), GROUPS)
    staging = Staging(pool, ChannelOptions(segment_bytes))
    most = max(1, segment_bytes // PAGE_BYTES)
    for _ in range(3):
        segments = list(staging.segments(FIRST, Push(1, SECOND, b"")))
        assert np.concatenate([segment.pages for segment in segments]).tolist() == FIRST.tolist()
        assert {len(segment.pages) for segment in segments[:-1]} <= {most}
        for segment in segments:
            staged, ids = segment.slot.staged(segment), segment.slot.ids(segment)
            assert len(staged) == len(ids) == len(segment.pages) <= most
        assert not any(segment.ends for segment in segments[:-1])
        assert segments[-1].ends is not None


def meet() -> tuple[NcclTransport, NcclTransport]:
    pools = [torch.zeros(32, PAGE_BYTES, dtype=torch.uint8) for _ in "ab"]
    pools[0].random_(1, 255)
    options = ChannelOptions(segment_bytes=2 * PAGE_BYTES)
    a, b = (
        NcclTransport(name, PoolMemory.of(pool, GROUPS), options)
        for name, pool in zip("ab", pools, strict=True)
    )
    a.open(b.endpoint)
    b.open(a.endpoint)
    return a, b


def ends(a: NcclTransport, b: NcclTransport) -> tuple[list[PushState], list[bytes]]:
    """How the next pushes of `a` end, and what `b` is shown until then."""
    states: list[PushState] = []
    shown: list[bytes] = []

    def look() -> bool:
        # The sender before the receiver, which is told first: what ended is shown by now.
        states.extend(state for _, state in a.poll_pushes())
        shown.extend(told.payload for told in b.poll_notifications())
        return bool(states)

    wait_until(look)
    return states, shown


GROUPS = [PageGroup(PAGE_BYTES, 32)]
FIRST, SECOND = (np.arange(start, start + 12, dtype=np.int32) for start in (0, 16))


def meet_and_push() -> tuple[NcclTransport, NcclTransport]:
    """Their channel has moved a push and has nothing to do."""
    a, b = meet()
    a.push("b", FIRST, SECOND, b"before")
    assert ends(a, b) == ([PushState.DONE], [b"before"])
    return a, b


def test_pushes_arrive_in_order() -> None:
    """Behind each other, and each when nothing is before it."""
    a, b = meet()
    rng = np.random.default_rng(0)
    wanted, payloads, states, shown = b._pool.pages(0).clone(), [], [], []
    for number in range(40):
        count = int(rng.integers(1, 31))
        source, target = (rng.permutation(32)[:count].astype(np.int32) for _ in "ab")
        wanted[target] = a._pool.pages(0)[source]
        payloads.append(bytes(number))
        a.push("b", source, target, payloads[-1])
        if rng.random() < 0.5:
            more, also = ends(a, b)
            states, shown = states + more, shown + also
    while len(states) < 40:
        more, also = ends(a, b)
        states, shown = states + more, shown + also
    assert states == [PushState.DONE] * 40
    assert shown == payloads
    assert torch.equal(b._pool.pages(0), wanted)
    for transport in (a, b):
        transport.shutdown()


def test_a_push_of_another_number_of_pages_is_refused() -> None:
    a, b = meet()
    with pytest.raises(TransportError, match="12 pages to 11"):
        a.push("b", FIRST, SECOND[1:], b"")
    a.push("b", FIRST, SECOND, b"whole")
    assert ends(a, b) == ([PushState.DONE], [b"whole"])
    for transport in (a, b):
        transport.shutdown()


@pytest.mark.parametrize(("owner", "fails"), [(Wire, "send_push"), (SendChannel, "_move")])
def test_a_push_that_fails_ends_though_none_comes_behind_it(
    monkeypatch: pytest.MonkeyPatch, owner: type, fails: str
) -> None:
    a, b = meet_and_push()

    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(owner, fails, broken)
    a.push("b", FIRST, SECOND, b"fails")
    assert ends(a, b) == ([PushState.ERROR], [])
    for transport in (a, b):
        transport.shutdown()


@pytest.mark.parametrize(
    ("end", "broken_at"),
    [(SendChannel, 1), (SendChannel, 2), (SendChannel, 4), (ReceiveChannel, 4)],
)
def test_pushes_end_where_a_lane_fails_and_the_next_one_forms_another(
    monkeypatch: pytest.MonkeyPatch, end: type[Channel], broken_at: int
) -> None:
    a, b = meet_and_push()
    move, moved = end._move, []

    def broken(self: Channel, segment: object) -> None:
        moved.append(segment)
        if len(moved) == broken_at:
            raise RuntimeError
        move(self, segment)

    monkeypatch.setattr(end, "_move", broken)
    b._pool.pages(0).zero_()
    a.push("b", FIRST, SECOND, b"fails")
    a.push("b", SECOND, FIRST, b"behind it")
    states, shown = ends(a, b)
    assert states == [PushState.ERROR] * 2
    assert not shown

    # Whoever granted the pages may use them again: nothing writes them any more.
    b._pool.pages(0).zero_()
    time.sleep(0.3)
    assert not b._pool.pages(0).any()
    monkeypatch.undo()
    a.push("b", FIRST, SECOND, b"after")
    assert ends(a, b) == ([PushState.DONE], [b"after"])
    assert torch.equal(a._pool.pages(0)[FIRST], b._pool.pages(0)[SECOND])
    for transport in (a, b):
        transport.shutdown()


def test_a_lane_that_the_receiver_was_not_told_of_takes_no_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = meet()

    def cut(*_: object) -> None:
        raise TransportError("disconnected", "")

    monkeypatch.setattr(a._control, "notify", cut)
    with pytest.raises(TransportError):
        a.push("b", FIRST, SECOND, b"cut")
    monkeypatch.undo()
    a.push("b", FIRST, SECOND, b"whole")
    assert ends(a, b) == ([PushState.DONE], [b"whole"])
    for transport in (a, b):
        transport.shutdown()


def test_what_a_sender_says_behind_a_push_is_shown_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though both come while the receiver is looking."""
    a, b = meet()
    a.push("b", FIRST, SECOND, b"first")
    assert ends(a, b) == ([PushState.DONE], [b"first"])

    def late() -> list[Notification]:
        monkeypatch.undo()
        a.push("b", FIRST, SECOND, b"pushed")
        assert wait_until(a.poll_pushes)[0][1] is PushState.DONE
        a.notify("b", b"said")
        return wait_until(b._control.poll_notifications)

    monkeypatch.setattr(b._control, "poll_notifications", late)
    assert [told.payload for told in b.poll_notifications()] == [b"pushed", b"said"]
    for transport in (a, b):
        transport.shutdown()


def wires() -> tuple[Wire, Wire]:
    """The sender's end and the receiver's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = socket.create_connection(server.getsockname())
        return Wire(server.accept()[0]), Wire(receiver)


def test_pushes_that_are_read_at_once_are_heard_one_by_one() -> None:
    sender, receiver = wires()
    for handle in (1, 2):
        sender.send_push(Push(handle, FIRST + handle, b"%d" % handle))
    wait_until(receiver.has_push)
    time.sleep(0.1)
    for handle in (1, 2):
        assert receiver.has_push()
        push = receiver.next_push()
        assert (push.handle, push.payload) == (handle, b"%d" % handle)
        assert push.target.tolist() == (FIRST + handle).tolist()
    assert not receiver.has_push()
    sender.close()
    wait_until(receiver.has_push)
    with pytest.raises(EOFError):
        receiver.next_push()
    receiver.close()


def test_a_stranger_that_says_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_wire, "KEY_S", 0.05)
    key = bytes(KEY_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        host, port = server.getsockname()
        stranger = socket.create_connection((host, port))
        ours = Wire.connect(host, port, key, WAIT_S)
        theirs = pool.submit(Wire.accept, server, key, WAIT_S).result(timeout=WAIT_S / 2)
        theirs.send_landed(7)
        assert wait_until(ours.landed) == [7]
        for one in (stranger, ours, theirs):
            one.close()


def test_a_push_is_read_whole_whatever_signal_comes_in_the_middle() -> None:
    """Such as the one that wakes a stopped process."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        ThreadPoolExecutor(1) as pool,
        socket.create_connection(server.getsockname()) as sender,  # Its end ends the pool's thread.
    ):
        wire = Wire(server.accept()[0])
        reader = pool.submit(threading.get_ident).result()
        heard = pool.submit(wire.next_push)
        told = Push(7, np.array([5, 6], "<i4"), b"end", 1).packed()
        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        for part in (told[:5], told[5:18]):
            sender.sendall(part)
            time.sleep(0.1)
            signal.pthread_kill(reader, signal.SIGUSR1)
        sender.sendall(told[18:])
        push = heard.result(timeout=WAIT_S)
        signal.signal(signal.SIGUSR1, before)
    wire.close()
    assert (push.handle, push.target.tolist(), push.payload) == (7, [5, 6], b"end")
    assert push.group == 1


def test_a_receiver_that_is_closed_ends_what_is_on_its_way() -> None:
    a, b = meet()
    a.push("b", FIRST, SECOND, b"")
    assert ends(a, b) == ([PushState.DONE], [b""])
    b.close("a")
    a.push("b", FIRST, SECOND, b"")
    states, _ = ends(a, b)
    assert states == [PushState.ERROR]
    for transport in (a, b):
        transport.shutdown()
