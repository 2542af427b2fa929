"""Chunks and their grant, in every order, from two threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kv_transfer.specs import SendSpec
from prefill_service.outgoing import Destination, OutgoingPrompt

PAGES = np.arange(1, 4, dtype=np.int32)
ENDS = [4, 8, 10]


class Recorder:
    """A transfer thread that only listens."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def begin_send(self, spec: SendSpec) -> None:
        self.calls.append(("begin", spec))

    def chunk_computed(self, transfer_id: bytes, end_token: int, payload: bytes | None) -> None:
        assert transfer_id == b"t" * 16
        self.calls.append(("chunk", (end_token, payload)))

    def abort_send(self, transfer_id: bytes) -> None:
        self.calls.append(("abort", transfer_id))


def destination() -> Destination:
    return Destination(b"t" * 16, "decode", 7, PAGES + 10, 0)


def chunks(outgoing: OutgoingPrompt, ends: list[int]) -> None:
    for end in ends:
        outgoing.chunk(PAGES, end, b"first" if end == ENDS[-1] else None)


@pytest.mark.parametrize("before", range(4))
def test_the_grant_may_come_at_any_time(before: int) -> None:
    heard = Recorder()
    outgoing = OutgoingPrompt(heard, 10, 4, "")
    chunks(outgoing, ENDS[:before])
    assert heard.calls == []
    outgoing.grant(destination())
    chunks(outgoing, ENDS[before:])
    told = [value for kind, value in heard.calls if kind == "chunk"]
    assert [kind for kind, _ in heard.calls].count("begin") == 1
    assert heard.calls[0][0] == "begin"
    wanted = [(end, b"first" if end == 10 else None) for end in ENDS]
    assert told == wanted[max(0, before - 1) :]


def test_nothing_is_told_after_the_end() -> None:
    heard = Recorder()
    outgoing = OutgoingPrompt(heard, 10, 4, "")
    granted = destination()
    outgoing.grant(granted)
    assert outgoing.close() is granted
    chunks(outgoing, ENDS)
    assert heard.calls == []
    ungranted = OutgoingPrompt(heard, 10, 4, "")
    chunks(ungranted, ENDS)
    assert ungranted.close() is None
    ungranted.grant(destination())
    assert heard.calls == []


def test_the_source_pages_do_not_follow_the_engines_table() -> None:
    heard = Recorder()
    outgoing = OutgoingPrompt(heard, 10, 4, "")
    table = PAGES.copy()
    outgoing.chunk(table, 4, None)
    table[:] = 0
    outgoing.grant(destination())
    spec = heard.calls[0][1]
    assert isinstance(spec, SendSpec)
    assert spec.source_pages.tolist() == PAGES.tolist()
    assert spec.target_pages.tolist() == [11, 12, 13]


def test_two_threads_lose_nothing() -> None:
    for _ in range(200):
        heard = Recorder()
        outgoing = OutgoingPrompt(heard, 10, 4, "")
        ready = threading.Barrier(2)

        def compute(outgoing: OutgoingPrompt = outgoing, ready: threading.Barrier = ready) -> None:
            ready.wait()
            chunks(outgoing, ENDS)

        step_thread = threading.Thread(target=compute)
        step_thread.start()
        ready.wait()
        outgoing.grant(destination())
        step_thread.join()
        assert heard.calls[0][0] == "begin"
        assert heard.calls[-1] == ("chunk", (10, b"first"))
