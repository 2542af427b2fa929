"""Pages through staging buffers of every size and number, gathered, sent, scattered in pieces."""

from __future__ import annotations

import itertools
import signal
import socket
import struct
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
from kv_transfer.nccl import wire as lane_wire
from kv_transfer.nccl.channels import Lane, ReceiveLane, SendLane
from kv_transfer.nccl.staging import LaneOptions, Piece, Staging, cut
from kv_transfer.nccl.transport import NcclTransport
from kv_transfer.nccl.wire import AT_ONCE_BYTES, KEY_BYTES, LaneWire, Push
from kv_transfer.transports.factory import TRANSPORTS
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import Notification, PushState, TransportError


@pytest.mark.parametrize(
    "lanes",
    [
        LaneOptions(piece_bytes=1, slots=1),
        LaneOptions(piece_bytes=3 * PAGE_BYTES + 1, slots=1),
        LaneOptions(piece_bytes=5 * PAGE_BYTES, slots=2),
        LaneOptions(piece_bytes=NUM_PAGES * PAGE_BYTES, slots=3),
    ],
)
def test_every_piece_arrives_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch, lanes: LaneOptions
) -> None:
    monkeypatch.setitem(TRANSPORTS, "nccl", partial(NcclTransport, lanes=lanes))
    with a_world("nccl") as world:
        for num_pages in (1, 14, NUM_PAGES - 1):
            send(world, num_pages)


def send(world: World, num_pages: int) -> None:
    before = len(world.decode.of(Delivered))
    world.decode.pool.zero_()
    transfer = world.grant(num_pages * PAGE_TOKENS)
    transfer.begin()
    transfer.finish()
    world.until(lambda: len(world.decode.of(Delivered)) == before + 1)
    world.until(lambda: len(world.prefill.of(Sent)) == before + 1)
    transfer.assert_delivered()
    written = world.decode.pool.any(dim=1).sum()
    assert written == num_pages, "pages were written that nobody granted"


def test_pieces_are_a_push_in_order_and_none_is_longer_than_a_buffer() -> None:
    for seed in range(500):
        rng = np.random.default_rng(seed)
        most, num_pages = int(rng.integers(1, 40)), int(rng.integers(1, 400))
        first, last = (int(size) for size in rng.integers(1, most + 1, 2))
        parts = list(cut(num_pages, most, first, last))
        covered = [page for part in parts for page in range(part.start, part.stop)]
        assert covered == [*range(num_pages)], seed
        sizes = [part.stop - part.start for part in parts]
        assert sizes[0] == min(first, num_pages), seed
        assert max(sizes) <= most, seed
        for before, size in itertools.pairwise(sizes[:-1]):
            assert min(last, 2 * before) <= size <= 2 * before, seed
        largest = sizes.index(max(sizes))
        assert sizes[:largest] == sorted(sizes[:largest]), seed
        assert sizes[largest:] == sorted(sizes[largest:], reverse=True), seed


@pytest.mark.parametrize("piece_bytes", [1, PAGE_BYTES - 1, PAGE_BYTES, 5 * PAGE_BYTES + 1])
def test_what_a_buffer_holds_bounds_all_pieces(piece_bytes: int) -> None:
    pool = PoolMemory.of(torch.zeros(32, PAGE_BYTES, dtype=torch.uint8), PAGE_BYTES, 32)
    options = LaneOptions(piece_bytes, first_bytes=3 * PAGE_BYTES, last_bytes=9 * PAGE_BYTES)
    staging = Staging(pool, options)
    for _ in range(3):
        pieces = list(staging.pieces(FIRST, Push(1, SECOND, b"")))
        assert np.concatenate([piece.pages for piece in pieces]).tolist() == FIRST.tolist()
        for piece in pieces:
            assert {len(part) for part in (piece.room.staged, piece.room.ids)} == {len(piece.pages)}
        assert [piece.ends is not None for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def meet(at_once: int = 0) -> tuple[NcclTransport, NcclTransport]:
    pools = [torch.zeros(32, PAGE_BYTES, dtype=torch.uint8) for _ in "ab"]
    pools[0].random_(1, 255)
    sizes = {"piece_bytes": 2 * PAGE_BYTES, "first_bytes": PAGE_BYTES, "last_bytes": PAGE_BYTES}
    lanes = LaneOptions(**sizes, slots=3, at_once=at_once)
    a, b = (
        NcclTransport(name, PoolMemory.of(pool, PAGE_BYTES, 32), lanes)
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


FIRST, SECOND = (np.arange(start, start + 12, dtype=np.int32) for start in (0, 16))


def meet_and_push(at_once: int = 0) -> tuple[NcclTransport, NcclTransport]:
    """Their lane has moved a push and has nothing to do: the next one is queued by who puts it,
    where that may be."""
    a, b = meet(at_once)
    a.push("b", FIRST, SECOND, b"before")
    assert ends(a, b) == ([PushState.DONE], [b"before"])
    lane = a._peers["b"].out
    assert lane is not None
    # The receiver may tell of the push sooner than the sender's thread counts it.
    wait_until(lambda: lane._num_queued == lane._num_put)
    return a, b


def test_who_puts_a_push_queues_its_first_pieces_once_the_lane_was_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    move, movers = SendLane._move, []

    def watched(self: SendLane, piece: Piece) -> None:
        movers.append(threading.current_thread() is threading.main_thread())
        move(self, piece)

    monkeypatch.setattr(SendLane, "_move", watched)
    a, b = meet_and_push(at_once=3)
    assert movers
    assert not any(movers), "a first use waits for the other end to connect"
    movers.clear()
    for pages in (FIRST, SECOND):  # The second of them waits its turn.
        a.push("b", pages, pages, b"%d" % pages[0])
    states, shown = ends(a, b)
    while len(states) < 2:
        more, also = ends(a, b)
        states, shown = states + more, shown + also
    assert shown == [b"0", b"16"]
    assert movers == [True] * 3 + [False] * (len(movers) - 3)
    for pages in (FIRST, SECOND):
        assert torch.equal(a._pool.pages[pages], b._pool.pages[pages])
    for transport in (a, b):
        transport.shutdown()


@pytest.mark.parametrize("at_once", [0, 1, 3])
def test_pushes_arrive_in_order_whoever_queues_them(at_once: int) -> None:
    """Behind each other, and each when nothing is before it."""
    a, b = meet(at_once)
    rng = np.random.default_rng(at_once)
    wanted, payloads, states, shown = b._pool.pages.clone(), [], [], []
    for number in range(40):
        count = int(rng.integers(1, 31))
        source, target = (rng.permutation(32)[:count].astype(np.int32) for _ in "ab")
        wanted[target] = a._pool.pages[source]
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
    assert torch.equal(b._pool.pages, wanted)
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


@pytest.mark.parametrize(("owner", "fails"), [(LaneWire, "tell_push"), (SendLane, "_move")])
def test_a_push_that_fails_in_the_hands_of_who_puts_it_ends_though_none_comes_behind_it(
    monkeypatch: pytest.MonkeyPatch, owner: type, fails: str
) -> None:
    a, b = meet_and_push(at_once=3)

    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(owner, fails, broken)
    a.push("b", FIRST, SECOND, b"fails")
    assert ends(a, b) == ([PushState.ERROR], [])
    for transport in (a, b):
        transport.shutdown()


@pytest.mark.parametrize(
    ("end", "at_once", "broken_at"),
    [(SendLane, 0, 4), (SendLane, 3, 1), (SendLane, 3, 2), (SendLane, 3, 4), (ReceiveLane, 0, 4)],
)
def test_pushes_end_where_a_lane_fails_and_the_next_one_forms_another(
    monkeypatch: pytest.MonkeyPatch, end: type[Lane], at_once: int, broken_at: int
) -> None:
    a, b = meet_and_push(at_once)
    move, moved = end._move, []

    def broken(self: Lane, piece: object) -> None:
        moved.append(piece)
        if len(moved) == broken_at:
            raise RuntimeError
        move(self, piece)

    monkeypatch.setattr(end, "_move", broken)
    b._pool.pages.zero_()
    a.push("b", FIRST, SECOND, b"fails")
    a.push("b", SECOND, FIRST, b"behind it")
    states, shown = ends(a, b)
    assert states == [PushState.ERROR] * 2
    assert not shown

    # Whoever granted the pages may use them again: nothing writes them any more.
    b._pool.pages.zero_()
    time.sleep(0.3)
    assert not b._pool.pages.any()
    monkeypatch.undo()
    a.push("b", FIRST, SECOND, b"after")
    assert ends(a, b) == ([PushState.DONE], [b"after"])
    assert torch.equal(a._pool.pages[FIRST], b._pool.pages[SECOND])
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


def wires() -> tuple[LaneWire, LaneWire]:
    """The sender's end and the receiver's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = socket.create_connection(server.getsockname())
        return LaneWire(server.accept()[0]), LaneWire(receiver)


def test_telling_of_a_push_never_waits_where_it_fits_at_once_and_all_before_it_landed() -> None:
    sender, receiver = wires()
    sender._socket.settimeout(0)  # A wait is an error.
    sender._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, AT_ONCE_BYTES)  # It doubles it.
    push = Push(7, np.empty(0, np.int32), bytes(AT_ONCE_BYTES - 16))
    assert push.fits_at_once
    assert not push._replace(payload=bytes(AT_ONCE_BYTES - 15)).fits_at_once
    assert not push._replace(target=FIRST).fits_at_once
    for _ in range(100):
        sender.tell_push(push)
        assert receiver.next_push().handle == 7
        receiver.tell_landed(7)
        assert wait_until(sender.landed, poll_s=0) == [7]
    for wire in (sender, receiver):
        wire.close()


def test_pushes_that_are_read_at_once_are_heard_one_by_one() -> None:
    sender, receiver = wires()
    for handle in (1, 2):
        sender.tell_push(Push(handle, FIRST + handle, b"%d" % handle))
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
    monkeypatch.setattr(lane_wire, "KEY_S", 0.05)
    key = bytes(KEY_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        host, port = server.getsockname()
        stranger = socket.create_connection((host, port))
        ours = LaneWire.connect(host, port, key, WAIT_S)
        theirs = pool.submit(LaneWire.accept, server, key, WAIT_S).result(timeout=WAIT_S / 2)
        theirs.tell_landed(7)
        assert wait_until(ours.landed) == [7]
        for one in (stranger, ours, theirs):
            one.close()


def test_a_push_is_read_whole_whatever_signal_comes_in_the_middle() -> None:
    """Such as the one that wakes a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        sender = socket.create_connection(server.getsockname())
        wire = LaneWire(server.accept()[0])
        reader = pool.submit(threading.get_ident).result()
        heard = pool.submit(wire.next_push)
        told = struct.pack("<QII", 7, 2, 3) + np.array([5, 6], "<i4").tobytes() + b"end"
        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        for part in (told[:5], told[5:18]):
            sender.sendall(part)
            time.sleep(0.1)
            signal.pthread_kill(reader, signal.SIGUSR1)
        sender.sendall(told[18:])
        push = heard.result(timeout=WAIT_S)
        signal.signal(signal.SIGUSR1, before)
        sender.close()
        wire.close()
    assert (push.handle, push.target.tolist(), push.payload) == (7, [5, 6], b"end")


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
