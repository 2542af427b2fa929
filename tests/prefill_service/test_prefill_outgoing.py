"""Chunks and their grant, in every order, from two threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from baton.worker.v1 import worker_pb2
from engine.group_pages import GroupPages
from kv_transfer.specs import SendSpec, Source, Target
from kv_transfer.types import PageGroup
from prefill_service.outgoing import Destination, OutgoingPrompt
from serving.wire import pack_ids
from worker_base.page_layout import PageLayout

PAGES = np.arange(1, 4, dtype=np.int32)
ENDS = [4, 8, 10]


class Recorder:
    """A transfer thread that only listens."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        self.sources: list[Sequence[Source]] = []

    def begin_send(self, spec: SendSpec) -> None:
        self.calls.append(("begin", spec))

    def chunk_computed(
        self, transfer_id: bytes, end_token: int, payload: bytes | None, sources: Sequence[Source]
    ) -> None:
        assert transfer_id == b"t" * 16
        assert sources[0].pages.tolist() == PAGES.tolist()
        self.sources.append(sources)
        self.calls.append(("chunk", (end_token, payload)))

    def abort_send(self, transfer_id: bytes) -> None:
        self.calls.append(("abort", transfer_id))


def destination() -> Destination:
    return Destination(b"t" * 16, "decode", 7, (Target(PAGES + 10),))


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
    assert [target.pages.tolist() for target in spec.targets] == [[11, 12, 13]]
    outgoing.chunk(table, 8, None)
    assert [kind for kind, _ in heard.calls] == ["begin", "chunk", "chunk"]


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


def grant_of(*groups: worker_pb2.GroupGrant, held_pages: int = 1) -> worker_pb2.Grant:
    return worker_pb2.Grant(
        transfer_id=b"t" * 16,
        decode_agent_name="decode",
        page_ids=pack_ids(PAGES + 10),
        held_pages=held_pages,
        groups=groups,
    )


def test_a_grant_has_a_range_of_every_group() -> None:
    window = worker_pb2.GroupGrant(first_page=1, page_ids=pack_ids([7, 8]), held_pages=1)
    one, two = (PageLayout(16, (PageGroup(1, 9),) * groups) for groups in (1, 2))
    granted = Destination.of(grant_of(window), "decode", 3, two)
    assert granted is not None
    assert [(one.begin, one.end) for one in granted.targets] == [(1, 3), (2, 3)]
    assert granted.held_pages == 2
    late = worker_pb2.GroupGrant(first_page=2, page_ids=window.page_ids)
    held = worker_pb2.GroupGrant(first_page=1, page_ids=window.page_ids, held_pages=3)
    cut = worker_pb2.GroupGrant(first_page=1, page_ids=b"\1\0")
    state = PageLayout(16, two.groups, (None, None), frozenset({1}))
    page = worker_pb2.GroupGrant(page_ids=pack_ids([7]))
    granted = Destination.of(grant_of(page), "decode", 3, state)
    assert granted is not None
    assert granted.targets[1].is_state
    for grant, layout in (
        (grant_of(window), one),
        (grant_of(), two),
        (grant_of(late), two),
        (grant_of(held), two),
        (grant_of(cut), two),
        (grant_of(window, held_pages=4), two),
        (grant_of(page), two),
        (grant_of(window), state),
        (grant_of(worker_pb2.GroupGrant(page_ids=window.page_ids)), state),
    ):
        assert Destination.of(grant, "decode", 3, layout) is None


def test_pages_behind_a_window_are_those_of_the_latest_chunk() -> None:
    heard = Recorder()
    outgoing = OutgoingPrompt(heard, 10, 4, "")
    kept = np.array([5, 6], np.int32)
    outgoing.chunk(PAGES, 8, None, [GroupPages(0, kept)])
    kept[:] = 0
    window = np.array([6, 9], np.int32)
    outgoing.chunk(PAGES, 10, b"first", [GroupPages(1, window)])
    window[:] = 0
    outgoing.grant(destination())
    (told,) = heard.sources
    assert [(one.first_page, one.pages.tolist()) for one in told] == [(0, [1, 2, 3]), (1, [6, 9])]
