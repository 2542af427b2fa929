"""Two ranks of a GPU's executor in one process, in Triton's interpreter. An engine takes them for
one: each has its part of the model, and pages of its own."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from interpreted_executor import on_a_device, patches

from engine.cuda.ranks.collective import CudaCollective
from engine.parts import building
from engine.parts.paging import make_pages, shard_of
from engine.ranks.steps import decode, encode

RANKS, LONGEST_S = 2, 900.0
CPU = torch.device("cpu")


class Turns:
    """One rank runs at a time, until it waits for the others: there is one interpreter."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._all = threading.Barrier(RANKS, timeout=LONGEST_S)
        self._given: list[object] = [None] * RANKS

    def exchange(self, rank: int, value):
        """What each rank has given."""
        self._given[rank] = value
        self._wait()
        found = list(self._given)
        self._wait()
        return found

    def _wait(self) -> None:
        self.lock.release()
        try:
            self._all.wait()
        finally:
            self.lock.acquire()


class TwoRanks(CudaCollective):
    """Sums through memory of the host."""

    def __init__(self, rank: int, turns: Turns) -> None:
        super().__init__(rank, RANKS, CPU)
        self._turns = turns

    def all_reduce(self, x):
        return x.copy_(torch.stack(self._turns.exchange(self.rank, x.clone())).sum(0))

    def gather_on_all(self, x):
        return torch.stack(self._turns.exchange(self.rank, x.clone()))

    def gather(self, x, width):
        parts = self._turns.exchange(self.rank, x.clone())
        return torch.cat(parts, 1)[:, :width].contiguous() if self.rank == 0 else x

    def broadcast(self, x):
        x.copy_(self._turns.exchange(self.rank, x.clone())[0])

    def barrier(self):
        self._turns.exchange(self.rank, None)


class Pair:
    """Both executors. The second one gets steps as they come over the wire."""

    def __init__(self, ranks, turns: Turns) -> None:
        self.ranks, self._turns = ranks, turns

    def launch(self, plan):
        told = decode([bytes(frame) for frame in encode(plan)])
        failed = []

        def follow() -> None:
            with self._turns.lock:
                launched = self.ranks[1].launch(told)
            launched.add_done_callback(lambda done: failed.append(done.exception()))

        other = threading.Thread(target=follow)
        other.start()
        with self._turns.lock:
            launched = self.ranks[0].launch(plan)
        other.join()
        return launched

    def __getattr__(self, name: str):
        return getattr(self.ranks[0], name)


@contextmanager
def on_two_ranks():
    """Until it ends, engines have two ranks where they think to have one."""

    def pair(config, loaded, pools, sampler, hooks, progress=None):
        turns, ranks = Turns(), []
        own = replace(config, tp=RANKS, num_pages=pools.first.num_pages)
        for rank in range(RANKS):
            part = building.load(own, CPU, TwoRanks(rank, turns), shard=shard_of(own, rank))
            pages = make_pages(pools.first.num_pages, own, part, CPU)
            given = own, part, pages, sampler if rank == 0 else None, hooks
            ranks.append(on_a_device(*given))
        return Pair(ranks, turns)

    with patches(), patch.object(building, "cuda_executor", pair):
        yield
