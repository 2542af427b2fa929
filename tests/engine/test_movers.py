"""Copies between a GPU's pool and host slots go in small batches: a step's input gets by."""

from __future__ import annotations

import statistics
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import zmq

from engine.ranks.copies import CopyingRanks, SharedMover, begin_copying
from engine.ranks.keeper import RankError
from engine.tiers import movers
from engine.tiers.arena import HostArena
from engine.tiers.movers import BATCHES_AHEAD, CudaMover, batches

PAGE_BYTES = 4096


def test_batches_hold_every_page_once_and_are_small() -> None:
    rng = np.random.default_rng(1)
    read = rng.permutation(200)[:120].astype(np.int32)
    written = np.concatenate([np.arange(50, 110), 200 + rng.permutation(60)]).astype(np.int32)
    read[:40] = np.arange(300, 340)
    for most, in_run in ((1, 1), (7, 7), (8, 1), (500, 500)):
        found = list(batches(read, written, most, in_run))
        assert max(sum(count for _, _, count in batch) for batch in found) <= most
        runs = [run for batch in found for run in batch]
        assert max(count for _, _, count in runs) <= in_run
        pairs = [(a + i, b + i) for a, b, count in runs for i in range(count)]
        assert sorted(pairs) == sorted(zip(read.tolist(), written.tolist(), strict=True))


class Device:
    """Copies at once, and counts what it has been given and not been waited for."""

    def __init__(self) -> None:
        self.ahead = self.most_ahead = 0

    def event(self, blocking: bool) -> Device:
        assert blocking
        return self

    def record(self, _stream: object) -> None:
        self.ahead += 1
        self.most_ahead = max(self.most_ahead, self.ahead)

    def synchronize(self) -> None:
        self.ahead -= 1


@pytest.mark.parametrize("padding", [0, PAGE_BYTES])
def test_a_device_has_few_batches_at_a_time(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    device = Device()
    monkeypatch.setattr(movers, "BATCH_BYTES", 8 * PAGE_BYTES)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    pages = torch.randint(0, 256, (100, PAGE_BYTES), dtype=torch.uint8)
    slots = torch.zeros(100, PAGE_BYTES + padding, dtype=torch.uint8)
    places, before = np.arange(100, dtype=np.int32), pages.clone()
    mover = CudaMover(pages, slots)
    mover.save(places, places[::-1].copy())
    pages.zero_()
    mover.load(places, places[::-1].copy())
    assert torch.equal(pages, before)
    assert device.most_ahead == BATCHES_AHEAD
    assert device.ahead == 0


@pytest.mark.gpu
def test_a_steps_input_does_not_wait_for_a_load() -> None:
    """2 GiB are loaded in 40 ms; a small copy to the device meanwhile waits for a batch or two."""
    device, page_bytes, count = torch.device("cuda"), 2 << 20, 1024
    pages = torch.zeros(count, page_bytes, dtype=torch.uint8, device=device)
    arena = HostArena((count + 1) * page_bytes, page_bytes, device)
    mover, places = CudaMover(pages, arena.slots), np.arange(count, dtype=np.int32)
    small = torch.zeros(4096, dtype=torch.int32, pin_memory=True)
    target = torch.zeros(4096, dtype=torch.int32, device=device)
    stream = torch.cuda.Stream(device)

    def copied_s() -> float:
        began_s = time.perf_counter()
        with torch.cuda.stream(stream):
            target.copy_(small, non_blocking=True)
        stream.synchronize()
        return time.perf_counter() - began_s

    mover.load(places, places)
    alone_s = statistics.median(copied_s() for _ in range(50))
    began_s = time.perf_counter()
    load = threading.Thread(target=mover.load, args=(places, places))
    load.start()
    beside_s = []
    while load.is_alive():
        beside_s.append(copied_s())
    load_s = time.perf_counter() - began_s
    rate = count * page_bytes / load_s / 1e9
    print(f"alone {1e3 * alone_s:.3f} ms, beside {1e3 * max(beside_s):.3f}, load {rate:.1f} GB/s")
    arena.close()
    assert max(beside_s) < load_s / 8


def test_a_copy_fails_if_another_rank_cannot_make_its_part() -> None:
    """The next one is a copy like any other."""
    made: list[tuple[list[int], list[int]]] = []
    other: list[tuple[list[int], list[int]]] = []

    class Part:
        def __init__(self, made: list[tuple[list[int], list[int]]]) -> None:
            self._made = made

        def save(self, pages: np.ndarray, slots: np.ndarray) -> None:
            if 13 in pages:
                raise OSError
            self._made.append((pages.tolist(), slots.tolist()))

        load = save

    context = zmq.Context()  # Never ended: the other rank's threads are not, either.
    ends = {name: context.socket(zmq.PAIR) for name in ("save", "load")}
    for name, end in ends.items():
        end.bind(f"inproc://{name}")

    def connect(direction: str) -> zmq.Socket[bytes]:
        other = context.socket(zmq.PAIR)
        other.connect(f"inproc://{direction}")
        return other

    begin_copying(1, [Part(made), Part(other)], connect)
    rank_0 = SimpleNamespace(save=lambda *_: None)
    ranks = CopyingRanks([ends["save"]], [ends["load"]], str)
    both = SharedMover(rank_0, ranks)
    with pytest.raises(RankError, match=r"could not copy their parts: \[1\]"):
        both.save(np.array([13]), np.array([0]))
    both.save(np.array([4, 5]), np.array([1, 2]))
    SharedMover(rank_0, ranks, 1).save(np.array([6]), np.array([3]))
    assert made == [([4, 5], [1, 2])]
    assert other == [([6], [3])]
    ranks.close()
