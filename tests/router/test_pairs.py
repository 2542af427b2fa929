"""Pairs of workers: the same as if each was looked at, without looking at each."""

from __future__ import annotations

import random
from collections.abc import Set
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from baton.worker.v1 import worker_pb2
from router.jobs import Demand, ServedModel
from router.placement import routing
from router.placement.cost import Cost
from router.placement.pairs import agreeing, largest, pairs_of, passing
from router.workers.load_estimate import Capacity
from router.workers.registry import DECODES, PREFILLS, can_hand_off

ROLES = (
    worker_pb2.WORKER_ROLE_PREFILL,
    worker_pb2.WORKER_ROLE_DECODE,
    worker_pb2.WORKER_ROLE_BOTH,
)
MODEL = ServedModel("m", "r", "", 1 << 14, 1, (), 16)


@dataclass(eq=False)
class Worker:
    """The parts that routes depend on."""

    agent_name: str
    role: int
    fingerprint: str = "f"
    size: int = 0
    complained_of: Set[str] = frozenset()
    reads: int = field(default=0, init=False)

    draining = False
    model = "m", "r"
    extensions: Set[str] = frozenset()
    gave_up_on: Set[str] = frozenset()
    estimate = SimpleNamespace(held=lambda holder: 0)

    def __post_init__(self) -> None:
        model = worker_pb2.ModelInfo(name="m", revision="r", fingerprint=self.fingerprint)
        self._identity = worker_pb2.WorkerIdentity(role=self.role, model=model)  # type: ignore[arg-type]

    def serves(self, _model: object) -> bool:
        return True

    @property
    def kind(self) -> tuple[object, ...]:
        return self.role, self.fingerprint, bool(self.agent_name)

    @property
    def worker_id(self) -> str:
        return self.agent_name

    @property
    def prefills(self) -> bool:
        return self.role in PREFILLS

    @property
    def decodes(self) -> bool:
        return self.role in DECODES

    @property
    def identity(self) -> worker_pb2.WorkerIdentity:
        self.reads += 1
        return self._identity

    def capacity(self) -> Capacity:
        self.reads += 1
        return Capacity(0, 4096, 40_000.0, 0.0, 0, 64, 1000, 1000)


def drawn(rng: random.Random) -> list[Any]:
    workers = [
        Worker(rng.choice(["", f"a{i}", f"a{i}"]), rng.choice(ROLES), rng.choice("fg"), i)
        for i in range(rng.randint(1, 9))
    ]
    names = [worker.agent_name for worker in workers if worker.agent_name]
    for worker in workers:
        worker.complained_of = {name for name in names if rng.random() < 0.2}
    return workers


def every_pair(workers: list[Any], *, decodes: bool) -> list[tuple[Any, Any]]:
    found = []
    for first in workers:
        if first.role == worker_pb2.WORKER_ROLE_BOTH:
            found.append((first, first))
        elif first.role in PREFILLS and not decodes:
            found.append((first, None))
        elif first.role in PREFILLS:
            found += [(first, other) for other in workers if can_hand_off(first, other)]
    return found


@pytest.mark.parametrize("decodes", [True, False])
def test_pairs_are_those_that_a_look_at_each_finds(decodes: bool) -> None:
    rng = random.Random(3)
    for _ in range(500):
        workers = drawn(rng)
        wanted = every_pair(workers, decodes=decodes)
        apart = set(rng.sample(wanted, min(len(wanted), rng.randint(0, 2))))
        firsts, partners = ({one for one in workers if rng.random() < 0.7} for _ in range(2))

        found = pairs_of(workers, decodes=decodes)
        assert [(first, one) for first, ones in found.items() for one in ones] == wanted
        for first, size in largest(found, lambda worker: worker.size):
            sizes = [one.size for each, one in wanted if each is first and one is not None]
            assert size == max(sizes, default=None)

        found = passing(found, firsts.__contains__, partners.__contains__)
        wanted = [(a, b) for a, b in wanted if a in firsts and (b is None or b in partners)]
        assert [(first, one) for first, ones in found.items() for one in ones] == wanted

        found = agreeing(found, lambda worker: worker.complained_of, apart)
        wanted = [
            (a, b)
            for a, b in wanted
            if b is None
            or not (
                (a, b) in apart
                or a.agent_name in b.complained_of
                or b.agent_name in a.complained_of
            )
        ]
        assert [(first, one) for first, ones in found.items() for one in ones] == wanted
        assert all(found.values())


def test_a_list_is_copied_only_where_somebody_complains_of_its_partners() -> None:
    workers: list[Any] = [Worker(f"a{i}", ROLES[i % 2]) for i in range(6)]
    found = pairs_of(workers, decodes=True)
    first = next(iter(found))
    first.complained_of = {"another model's worker"}
    assert agreeing(found, lambda worker: worker.complained_of)[first] is found[first]
    first.complained_of = {found[first][0].agent_name}
    assert agreeing(found, lambda worker: worker.complained_of)[first] == found[first][1:]


def test_a_search_for_a_route_looks_at_each_worker_a_few_times() -> None:
    """A search that looks at each pair of these looks at each worker hundreds of times."""
    workers: list[Any] = [Worker(f"a{i}", ROLES[i % 2]) for i in range(200)]
    demand = Demand(MODEL, 500, 100, 1)
    assert routing.choose(demand, workers, Cost(), routing.Failed(), "cached") is not None
    assert routing.largest_pool_tokens(demand, workers, "cached") == 16_000
    assert max(worker.reads for worker in workers) < 60
