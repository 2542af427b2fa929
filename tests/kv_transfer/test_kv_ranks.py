"""Ranks behind one transport: who writes what, and when a push counts."""

from __future__ import annotations

import os
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_world import NUM_PAGES, PAGE_TOKENS, RankedPool, World, a_world

from engine.model.shard import Shard
from kv_transfer.events import Delivered, Sent
from kv_transfer.ranks.group import GroupTransport, rank_agent
from kv_transfer.ranks.part import LocalPart
from kv_transfer.ranks.plan import Side, plan, units_of
from kv_transfer.transports.factory import make_transport
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.processes import ProcessWatch, own_process
from kv_transfer.types import PageGroup, PushState, TransportError

COUNTS = (1, 2, 3, 4, 8)
HEADS = (24, 8, 1)
HEAD_BYTES = 64
STAGED = PageGroup(4 * 2 * 64, 64, 4, num_layers=2, planes=(64,))


def fits(count: int, kv_heads: int) -> bool:
    return kv_heads % count == 0 or count % kv_heads == 0


MATRIX = [
    (writers, targets, kv_heads)
    for kv_heads in HEADS
    for writers in COUNTS
    for targets in COUNTS
    if fits(writers, kv_heads) and fits(targets, kv_heads)
]


@pytest.mark.parametrize(("writers", "targets", "kv_heads"), MATRIX)
def test_each_byte_has_one_writer(writers: int, targets: int, kv_heads: int) -> None:
    """And every pair of ranks moves the right bytes."""
    pieces = plan(Side(writers), Side(targets), kv_heads, (HEAD_BYTES,))
    for target in range(targets):
        size = len(units_of(target, targets, kv_heads)) * HEAD_BYTES
        written = np.zeros(size, np.int32)
        for (_, to), (piece,) in pieces.items():
            if to == target:
                written[piece.peer_offset : piece.peer_offset + piece.size] += 1
        assert (written == 1).all()
    assert (0, 0) in pieces
    writing = {writer for writer, _ in pieces}
    assert len(writing) == min(writers, max(targets, kv_heads)), "ranks that could share stay idle"
    kind = f"loopback {writers}-{targets}"
    with a_world(kind, groups=[PageGroup(kv_heads * HEAD_BYTES, NUM_PAGES, kv_heads)]) as world:
        hand_over(world)


def hand_over(world: World) -> None:
    """Two transfers, one of which begins with pages that are held already; then the other way."""
    for number, held_pages in enumerate((0, 2), 1):
        transfer = world.grant(5 * PAGE_TOKENS + 3, held_pages=held_pages)
        before = world.decode.pool[torch.from_numpy(transfer.target).long()].numpy()
        transfer.begin()
        transfer.compute(40)
        world.turn(2)
        transfer.finish()
        world.until(lambda number=number: len(world.decode.of(Delivered)) == number)
        world.until(lambda number=number: len(world.prefill.of(Sent)) == number)
        assert (transfer.received()[held_pages:] == transfer.content[held_pages:]).all()
        assert (transfer.received()[:held_pages] == before[:held_pages]).all()
        stats = world.prefill.of(Sent)[-1].stats
        assert stats.bytes == stats.pages * world.groups[0].page_bytes
    assert world.decode.counters.stale_notifications == 0
    pushed_back(world)


def pushed_back(world: World) -> None:
    pages = np.arange(1, 5, dtype=np.int32)
    source, target = (world.decode, world.prefill)
    content = torch.from_numpy(
        world.rng.integers(1, 255, (4, world.groups[0].page_bytes), dtype=np.uint8)
    )
    source.pool[torch.from_numpy(pages).long()] = content
    handle = source.transport.push(target.name, pages, pages[::-1].copy(), b"back")
    ended: dict[int, PushState] = {}
    seen: list[bytes] = []

    def over() -> bool:
        ended.update(source.transport.poll_pushes())
        seen.extend(told.payload for told in target.transport.poll_notifications())
        return handle in ended and b"back" in seen

    for _ in range(100_000):
        if over():
            break
    assert ended[handle] is PushState.DONE
    assert torch.equal(target.pool[torch.from_numpy(pages[::-1].copy()).long()], content)


@st.composite
def grids(draw: st.DrawFn, layers: int, units: int) -> tuple[int, list[int], list[int]]:
    """Ranks of each stage, where its layers end, and where the layers of bands do."""
    tp = draw(st.sampled_from([count for count in (1, 2, 4, 8) if fits(count, units)]))
    cuts = st.sets(st.integers(1, layers - 1), max_size=3) if layers > 1 else st.just(set())
    return tp, *([*sorted(draw(cuts)), layers] for _ in "ab")


def side(tp: int, ends: list[int], band_ends: list[int]) -> Side:
    layers = [range(*span) for span in pairwise([0, *ends])][::-1]
    bands = []
    for own in layers:
        cuts = [own.start, *(end for end in band_ends if end in own[1:]), own.stop]
        bands.append(tuple(range(*span) for span in pairwise(cuts)))
    return Side(tp, tuple(layers), tuple(bands))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), layers=st.integers(1, 6), units=st.sampled_from([1, 2, 4, 6]))
def test_pages_go_between_any_grids(data: st.DataObject, layers: int, units: int) -> None:
    """One writer a byte, both sides have one plan, and a push makes pages equal, there and back;
    with planes as FP8 has them."""
    planes = data.draw(st.sampled_from([(32,), (32, 4)]))
    drawn = [data.draw(grids(layers, units)) for _ in "ab"]
    sides = [side(*each) for each in drawn]
    (_, own_ends, own_bands), (other, ends, bands) = drawn
    pieces = plan(sides[0], sides[1], units, planes)
    for target in sides[1].ranks:
        box = len(units_of(target % other, other, units)) * len(sides[1].layers_of(target))
        written = np.zeros(box * sum(planes), np.int32)
        for (_, to), runs in pieces.items():
            for run in runs if to == target else ():
                written[run.peer_offset : run.peer_offset + run.size] += 1
        assert (written == 1).all()
    if own_ends == ends and own_bands == bands:
        # Equal stages share one run; ranks that hold unlike numbers of units, one for each band.
        for (writer, target), runs in pieces.items():
            held = (
                units_of(rank % each.tp, each.tp, units)
                for rank, each in zip((writer, target), sides, strict=True)
            )
            alike = len({len(each) for each in held}) == 1
            assert len(runs) == (1 if alike else len(sides[0].bands_of(writer)))
    for (_, stages, own_cuts), (_, others, cuts) in permutations(drawn):
        if others == [layers] and stages == cuts and {*own_cuts} <= {*stages}:
            assert {len(runs) for runs in pieces.values()} == {1}, "so do bands for stages"
    group = PageGroup(
        units * layers * sum(planes), NUM_PAGES, units, num_layers=layers, planes=planes
    )
    kinds = [f"{tp}@{' '.join(map(str, at))}/{' '.join(map(str, cut))}" for tp, at, cut in drawn]
    with a_world(f"loopback {'-'.join(kinds)}", groups=[group]) as world:
        hand_over(world)


@pytest.mark.parametrize("stages", ["1@1 3-2@3", "2@2 3-1@1 3"])
def test_stages_are_processes_over_nixl(stages: str) -> None:
    group = PageGroup(4 * 3 * 72, NUM_PAGES, 4, num_layers=3, planes=(64, 8))
    with a_world(f"nixl {stages}", groups=[group]) as world:
        hand_over(world)


def test_stages_meet_nobody_who_tells_no_layers() -> None:
    with (
        a_world("loopback 1@1 2-1@2", met=False, groups=[STAGED]) as staged,
        a_world(
            "loopback 1-1", met=False, groups=[STAGED._replace(num_layers=0, planes=())]
        ) as plain,
    ):
        endpoint = plain.decode.transport.endpoint
        with pytest.raises(TransportError, match="ranks_mismatch"):
            staged.prefill.transport.open(endpoint)


def test_the_plan_is_that_of_the_model() -> None:
    for kv_heads in HEADS:
        for count in COUNTS:
            if not fits(count, kv_heads):
                with pytest.raises(TransportError, match="ranks_mismatch"):
                    plan(Side(count), Side(1), kv_heads, (HEAD_BYTES,))
                continue
            for rank in range(count):
                heads = units_of(rank, count, kv_heads)
                assert Shard(rank, count).shared(kv_heads) == (heads.start, heads.stop)


# -- the parts of a push ------------------------------------------------------------------------


class Held:
    """Two groups over loopback. Every part of a push waits for the test."""

    def __init__(self, writers: int = 2, targets: int = 4, kv_heads: int = 4) -> None:
        self.kv_heads = kv_heads
        self.source, self.from_ = self._group("source", writers)
        self.target, self.to = self._group("target", targets)
        self.from_.open(self.to.endpoint)
        self.to.open(self.from_.endpoint)

    def _group(self, name: str, count: int) -> tuple[RankedPool, GroupTransport]:
        pool = RankedPool(count, (PageGroup(self.kv_heads * HEAD_BYTES, NUM_PAGES, self.kv_heads),))
        self.name = f"{name}-{os.getpid()}-{id(pool)}"
        parts = []
        for rank, part in enumerate(pool.ranks):
            agent = rank_agent(self.name, rank)
            transport = make_transport("loopback", agent, part, pool.parts[rank])
            assert isinstance(transport, LoopbackTransport)
            transport.holds = True
            parts.append(LocalPart(transport))
        return pool, GroupTransport(parts, [self.kv_heads])

    @property
    def parts(self) -> list[tuple[LoopbackTransport, int]]:
        """Parts in progress, oldest first at each rank."""
        ranks = [part.transport for part in self.from_._parts]
        return [(rank, handle) for rank in ranks for handle in rank.held_pushes]

    def push(self, page: int, mark: int) -> int:
        pages = np.array([page], np.int32)
        self.source[torch.tensor([page])] = torch.full(
            (1, self.kv_heads * HEAD_BYTES), mark, dtype=torch.uint8
        )
        return self.from_.push(self.to.endpoint.agent_name, pages, pages, b"%d" % mark)

    def has(self, page: int, mark: int) -> bool:
        return bool((self.target[torch.tensor([page])] == mark).all())

    def close(self) -> None:
        self.from_.shutdown()
        self.to.shutdown()


class Parts(RuleBasedStateMachine):
    """Pushes whose parts land, fail and are read in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()
        self.pages = iter(range(1, NUM_PAGES))
        self.left: dict[int, set[tuple[LoopbackTransport, int]]] = {}
        """Parts of each push that have not landed."""
        self.failed: set[int] = set()
        self.mark_of: dict[int, int] = {}
        self.told: list[int] = []
        self.ended: dict[int, PushState] = {}

    @rule()
    def push(self) -> None:
        if (page := next(self.pages, None)) is None:
            return
        before = set(self.held.parts)
        handle = self.held.push(page, page)
        self.left[handle] = set(self.held.parts) - before
        self.mark_of[handle] = page

    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        if parts := self.held.parts:
            rank, part = data.draw(st.sampled_from(parts))
            rank.land(part)
            self._ended(rank, part)

    @rule(data=st.data(), lands=st.booleans(), likely=st.integers(0, 5))
    def fail(self, data: st.DataObject, lands: bool, likely: int) -> None:
        if (parts := self.held.parts) and not likely:
            rank, part = data.draw(st.sampled_from(parts))
            self.failed.add(next(h for h, left in self.left.items() if (rank, part) in left))
            rank.fail(part, lands)
            if lands:
                self._ended(rank, part)

    @rule()
    def poll(self) -> None:
        for handle, state in self.held.from_.poll_pushes():
            assert handle not in self.ended, "a handle is reported once"
            self.ended[handle] = state

    @rule()
    def look(self) -> None:
        self.told += [int(told.payload) for told in self.held.to.poll_notifications()]

    def _ended(self, rank: LoopbackTransport, part: int) -> None:
        for left in self.left.values():
            left.discard((rank, part))

    @invariant()
    def nothing_is_told_too_early(self) -> None:
        for handle, left in self.left.items():
            mark = self.mark_of[handle]
            if left:
                assert mark not in self.told
                assert self.ended.get(handle) is not PushState.DONE
            if mark in self.told:
                assert self.held.has(mark, mark)
            if handle in self.failed:
                assert self.ended.get(handle) is not PushState.DONE

    def teardown(self) -> None:
        """Whatever landed whole is told, and once."""
        self.poll()
        self.look()
        whole = sorted(self.mark_of[handle] for handle, left in self.left.items() if not left)
        assert sorted(self.told) == whole
        done = {h for h, left in self.left.items() if not left} - self.failed
        assert {h for h, state in self.ended.items() if state is PushState.DONE} == done
        assert {h for h, state in self.ended.items() if state is PushState.ERROR} == self.failed
        self.held.close()


TestParts = Parts.TestCase
TestParts.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_part_that_cannot_be_started_is_an_error_and_a_first_one_starts_nothing() -> None:
    held = Held()
    parts = [part.transport for part in held.from_._parts]
    parts[1].close(rank_agent(held.to.endpoint.agent_name, 2))
    handle = held.push(5, 77)
    assert held.from_.poll_pushes() == [(handle, PushState.ERROR)]
    parts[0].close(held.to.endpoint.agent_name)
    began = len(held.parts)
    with pytest.raises(TransportError, match="disconnected"):
        held.push(6, 78)
    assert len(held.parts) == began
    held.close()


def test_a_transport_that_moves_whole_pages_alone_meets_no_ranks() -> None:
    with a_world("nccl", met=False) as whole, a_world("loopback 1-2", met=False) as ranked:
        part = LocalPart(whole.prefill.transport)
        group = GroupTransport([part], [4])
        endpoint = ranked.decode.transport.endpoint
        with pytest.raises(TransportError, match="transport_mismatch"):
            group.open(endpoint)


def test_a_group_is_gone_when_all_of_its_processes_are() -> None:
    import subprocess

    watch = ProcessWatch()
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    names = [process_of(child.pid) for child in children]
    watch.watch("both", names)
    watch.watch("partly hidden", [names[0], ""])
    children[0].kill()
    children[0].wait()
    assert watch.gone() == []
    children[1].kill()
    children[1].wait()
    assert watch.gone() == ["both"]
    assert watch.gone() == []
    watch.close()


def process_of(pid: int) -> str:
    boot, namespace, _, _ = own_process().split("/")
    with open(f"/proc/{pid}/stat") as file:
        return f"{boot}/{namespace}/{pid}/{file.read().rpartition(')')[2].split()[19]}"
