"""When the balance moves a worker, and when it keeps still."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from settings_kit import settings_of

from baton.worker.v1 import worker_pb2
from router.settings import RouterSettings, Thresholds
from router.workers.balance import DECODE, PREFILL, Balance, Move
from router.workers.life import AskedRole
from router.workers.load_estimate import LoadEstimate
from serving.settings import SettingsError

RATE = 1000
"""Prompt tokens a second."""
SLOTS = 100


@dataclass
class Link:
    """What the balance reads of a `WorkerLink`."""

    worker_id: str
    role: worker_pb2.WorkerRole.ValueType
    busy: float = 0.0
    """Part of the time or of the slots."""
    balancer: str = "router-0"
    flexible: bool = True
    draining: bool = False
    next_role: int = 0
    asked: AskedRole = field(default_factory=AskedRole)
    model: tuple[str, str] = ("m", "r")
    gave_up_on: frozenset[str] = frozenset()
    estimate: LoadEstimate = field(default_factory=LoadEstimate)

    @property
    def identity(self) -> worker_pb2.WorkerIdentity:
        return worker_pb2.WorkerIdentity(role=self.role)

    def report(self, now_s: float) -> None:
        load = worker_pb2.Load(
            max_sequences=SLOTS,
            total_pages=1000,
            free_pages=1000,
            prefill_tokens_per_s=RATE,
            balancer=self.balancer,
        )
        if self.role == PREFILL:
            load.computed_prompt_tokens = int(now_s * self.busy * RATE)
        else:
            load.running_sequences = int(self.busy * SLOTS)
        self.estimate.report(load)


def just_asked() -> AskedRole:
    """A worker was asked for a role, and its report does not have it yet."""
    asked = AskedRole(lambda: 0.0)
    asked.ask(DECODE, PREFILL)
    return asked


def pool(prefill: float, decode: float, counts: tuple[int, int] = (3, 3), **own: Any) -> list[Link]:
    """Workers as busy as that."""
    links = [Link(f"p{n}", PREFILL, prefill, **own) for n in range(counts[0])]
    return links + [Link(f"d{n}", DECODE, decode, **own) for n in range(counts[1])]


def moves(
    balance: Balance, links: list[Link], seconds: int, begin_s: int = 0, queued: int = 0
) -> list[tuple[int, Move]]:
    """What the balance does while nothing changes, and when."""
    found = []
    for now_s in range(begin_s, begin_s + seconds):
        for link in links:
            link.report(now_s)
        members: Any = links
        found += [
            (now_s, move) for move in balance.look(now_s, members, {"m": queued, "other": 1000})
        ]
    return found


@pytest.mark.parametrize(
    ("prefill", "decode", "counts", "to"),
    [
        (0.95, 0.05, (3, 3), "d0 prefill"),  # slots give tokens: 0.05 of them 0.21
        (0.10, 1.00, (3, 3), "p0 decode"),
        (0.95, 0.05, (3, 1), ""),  # the last one
        (0.95, 0.15, (3, 2), ""),  # the one that is left would be busier than its target
        (0.70, 0.05, (3, 3), ""),  # not busy enough
        (0.95, 0.50, (3, 3), ""),  # nobody has time
        (0.95, 1.00, (3, 3), ""),
        (0.00, 0.00, (3, 3), ""),
    ],
)
def test_a_worker_moves_where_one_pool_is_short_and_the_other_has_time(
    prefill: float, decode: float, counts: tuple[int, int], to: str
) -> None:
    found = moves(Balance(Thresholds(), "router-0"), pool(prefill, decode, counts), 200)
    roles = {PREFILL: "prefill", DECODE: "decode"}
    said = [f"{move.worker_id} {roles[move.role]}" for _, move in found]
    assert said[:1] == ([to] if to else [])
    if to:
        assert 60 <= found[0][0] <= 62
        assert "of their targets for 60 s" in found[0][1].why


def test_a_change_is_followed_by_none_for_a_while() -> None:
    """Whoever asked for it; a queue counts for the pool that is full."""
    balance, links = Balance(Thresholds(), "router-0"), pool(0.10, 1.00, (4, 2))
    ((at_s, first),) = moves(balance, links, 62, queued=10)[:1]
    mover = next(link for link in links if link.worker_id == first.worker_id)
    mover.next_role = DECODE
    assert moves(balance, links, 5, at_s + 1) == []
    mover.role, mover.next_role, mover.busy = DECODE, 0, 1.0
    ((again_s, second),) = moves(balance, links, 305, at_s + 6, queued=10)[:1]
    assert again_s - at_s >= 300
    assert second.worker_id != first.worker_id


@pytest.mark.parametrize(
    "own",
    [
        {"flexible": False},
        {"balancer": "router-00"},
        {"gave_up_on": frozenset({"somebody"})},
        {"draining": True},
        {"asked": just_asked()},
    ],
    ids=lambda own: next(iter(own)),
)
def test_nobody_moves(own: dict[str, Any]) -> None:
    """Who cannot; whom another router leads; while transfers may be overdue, or a change begins."""
    assert moves(Balance(Thresholds(), "router-0"), pool(0.95, 0.05, **own), 400) == []


@pytest.mark.parametrize(("queued", "figure"), [(0, 1 / 0.75), (SLOTS, 2 / 0.75)])
def test_only_what_waits_for_a_model_counts_for_its_figure(queued: int, figure: float) -> None:
    """Others have a thousand that wait."""
    balance = Balance(Thresholds(), "router-0")
    moves(balance, pool(0.5, 1.0, (1, 1)), 200, queued=queued)
    assert balance.ratios()["m", "decode"] == pytest.approx(figure, rel=0.01)


def test_a_moment_moves_nobody() -> None:
    balance = Balance(Thresholds(), "router-0")
    for start in range(0, 1000, 100):
        assert moves(balance, pool(0.95, 0.05), 50, start) == []
        assert moves(balance, pool(0.50, 0.20), 50, start + 50) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"balance_low": 1.4}, "balance_low 1.4 must be below 1 and balance_high 1.3 above"),
        ({"balance_high": 0.9}, "must be below 1 and balance_high 0.9 above"),
        ({"balance_apart_s": 30}, "balance_apart_s 30 must be at least balance_hold_s 60"),
    ],
)
def test_thresholds_that_contradict_are_refused(changes: dict[str, float], why: str) -> None:
    with pytest.raises((SettingsError, ValueError), match=why):
        settings_of(RouterSettings, balance="auto", **changes)
