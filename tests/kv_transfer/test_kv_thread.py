"""The transfer thread itself: starting, stopping, surviving."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest
import torch
from local_worker import WAIT_S, LocalWorker
from waiting import wait_until

from kv_transfer import thread
from kv_transfer.events import Delivered, PeerOpened, SendQuiesced
from kv_transfer.exchange import Exchange
from kv_transfer.specs import Range, ReceiveSpec, SendSpec, Source, Target
from kv_transfer.thread import TransferThread
from kv_transfer.transports.factory import make_transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.types import Notification, PageGroup, TransportError

PAGES = np.array([1], dtype=np.int32)


def test_a_transport_that_cannot_be_built_is_told_to_the_starter() -> None:
    pool = torch.zeros(10, 100)
    thread = TransferThread(
        lambda: make_transport("loopback", "short", pool, [PageGroup(4096, 10)]),
        1,
        lambda event: None,
    )
    with pytest.raises(TransportError, match="bad_pool"):
        thread.start()
    assert thread.stop(1.0)
    with pytest.raises(TransportError, match="unknown_transport"):
        make_transport("pigeon", "p", pool, [PageGroup(400, 10)])


def test_a_bug_in_building_is_told_without_its_text() -> None:
    def explode() -> LoopbackTransport:
        raise ValueError("secret")

    with pytest.raises(TransportError, match="internal: ValueError"):
        TransferThread(explode, 1, lambda event: None).start()


def test_building_that_does_not_end_is_not_waited_for_for_ever() -> None:
    over = threading.Event()

    def hang() -> LoopbackTransport:
        over.wait(WAIT_S)
        raise TransportError("unreachable", "too late for anybody to hear")

    thread = TransferThread(hang, 1, lambda event: None, start_timeout_s=0.1)
    with pytest.raises(TransportError, match="start_timeout"):
        thread.start()
    over.set()
    assert thread.stop(1.0)


def test_nixl_missing_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl_cu13._bindings", None)
    with pytest.raises(TransportError, match="install nixl-cu13"):
        make_transport("nixl", "n", torch.zeros(4, 4096, dtype=torch.uint8), [PageGroup(4096, 4)])


def test_stopping_waits_for_pushes_in_progress() -> None:
    prefill = LocalWorker("loopback", "stop-prefill", 4, 4096, 1)
    decode = LocalWorker("loopback", "stop-decode", 4, 4096, 1)
    prefill.thread.meet(decode.endpoint)
    decode.thread.meet(prefill.endpoint)
    prefill.events.wait(PeerOpened)
    assert isinstance(prefill.transport, LoopbackTransport)
    prefill.transport.delay_s = 0.2
    _send(prefill, decode, b"a" * 16)
    assert prefill.thread.stop(5.0)
    decode.events.wait(Delivered)
    assert prefill.thread.stop(0.0), "stopping again changes nothing"
    decode.close()


def test_stopping_in_time_leaves_a_push_that_does_not_end() -> None:
    prefill = LocalWorker("loopback", "stuck-prefill", 4, 4096, 1)
    decode = LocalWorker("loopback", "stuck-decode", 4, 4096, 1)
    prefill.thread.meet(decode.endpoint)
    prefill.events.wait(PeerOpened)
    assert isinstance(prefill.transport, LoopbackTransport)
    prefill.transport.holds = True
    _send(prefill, decode, b"b" * 16)
    wait_until(lambda: prefill.counters().sends_in_progress)
    assert not prefill.thread.stop(0.2)
    decode.close()


def test_the_thread_outlives_a_transport_that_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = LocalWorker("loopback", "moody", 4, 4096, 1)
    other = LocalWorker("loopback", "calm", 4, 4096, 1)
    raised = threading.Event()

    def explode() -> list[object]:
        raised.set()
        raise RuntimeError("secret")

    with monkeypatch.context() as patch:
        patch.setattr(worker.transport, "poll_pushes", explode)
        worker.thread.meet(other.endpoint)
        assert raised.wait(WAIT_S)
    worker.thread.abort_send(b"c" * 16)
    worker.events.wait(SendQuiesced)
    worker.events.wait(PeerOpened)
    assert "secret" not in caplog.text
    worker.close()
    other.close()


def _send(prefill: LocalWorker, decode: LocalWorker, transfer_id: bytes) -> None:
    ranges = (Range(0, 1),)
    decode.thread.expect(ReceiveSpec(transfer_id, prefill.endpoint.agent_name, ranges, 16, 60.0))
    spec = SendSpec(transfer_id, decode.endpoint.agent_name, 1, [Target(PAGES)], 16, 16)
    prefill.thread.begin_send(spec)
    prefill.thread.chunk_computed(transfer_id, 16, b"tokens", [Source(PAGES)])


def test_a_thread_with_nothing_to_do_takes_turns_and_one_that_hangs_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread, "LONGEST_PAUSE_S", 0.02)
    worker = LocalWorker("loopback", "turning", 4, 4096, 1)
    wait_until(lambda: worker.thread.turns > 2)
    hangs, over = threading.Event(), threading.Event()

    def hang() -> list[Notification]:
        hangs.set()
        over.wait(WAIT_S)
        return []

    with monkeypatch.context() as patch:
        patch.setattr(worker.transport, "poll_notifications", hang)
        assert hangs.wait(WAIT_S)
        turns = worker.thread.turns
        time.sleep(0.2)
        assert worker.thread.turns == turns
    over.set()
    wait_until(lambda: worker.thread.turns > turns)
    worker.close()


def test_a_wait_for_a_command_ends_however_short_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause may be over before the thread has begun to wait, as where it loses the processor."""
    monkeypatch.setattr(Exchange, "pause_s", lambda exchange: 1e-6)
    worker = LocalWorker("loopback", "restless", 4, 4096, 1)
    for number in range(3_000):
        worker.thread.abort_send(number.to_bytes(16, "big"))
        turns = worker.thread.turns
        wait_until(lambda: worker.thread.turns > turns + 1, poll_s=0)
    worker.close()
