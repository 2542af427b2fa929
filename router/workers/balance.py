"""Decides when a worker of one role should take the other one, by how busy both pools are.

Each pool has a figure, its use over its target, so that 1 is just right:

- Prefill: the part of the time in which prompts are computed. At 0.6 a prompt waits for 0.75 of its
  own time on average, at 0.9 for 4.5.
- Decode: how many of the tokens a second that it could have it has, by the larger of the slots and
  the pages in use, with those that requests wait for. Steps of a full worker read some four times
  the KV that they read of weights, so half of the slots give five sixths of the tokens.

A worker moves when one figure has been above `high` and the other below `low` for `hold_s`. Three
rules keep it from coming back at once. The pool that gives must keep within its target, and if the
other one held it up and sends it more now, below that one's figure of before. `apart_s` pass
between two changes of a model's workers, whoever asked for the first. What counts are means of the
last quarter of a minute.

Nobody moves while the path to a worker is given up, since transfers may be overdue there. `both`
workers are in neither pool.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from router.settings import Thresholds
    from router.workers.link import WorkerLink

PREFILL, DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE
MEAN_S: Final = 15.0
"""Figures are means over about this time: some hundred requests of a small cluster; not tuned."""
FULL_KV: Final = 4.0
"""KV that a step of a full decode worker reads, in bytes of weights: an H100 with Llama-3.1-8B has
53 GB of KV beside 16 GB of weights, and rows cost some time of their own."""
LOOK_S: Final = 1.0
"""Time between two looks at the load reports, which come ten times as often."""
_NAMES: Final[Mapping[int, str]] = {PREFILL: "prefill", DECODE: "decode"}


class Move(NamedTuple):
    """A worker that should change."""

    worker_id: str
    role: worker_pb2.WorkerRole.ValueType
    why: str


@dataclass
class _Model:
    """The two pools of a model."""

    figures: dict[int, float] = field(default_factory=dict)
    """Means by role."""
    computed: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that each worker had computed at the last look."""
    roles: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Role and next role of each worker at the last look."""
    looked_s: float = -math.inf
    since_s: float | None = None
    """Since when the figures call for a move, and of that kind."""
    wanted: int = 0
    changed_s: float = -math.inf


class Balance:
    """Looks at load reports.

    Args:
        thresholds: when to move.
        router: this router's name. Of the routers that balance the first by name does.
    """

    def __init__(self, thresholds: Thresholds, router: str) -> None:
        self._thresholds = thresholds
        self._router = router
        self._models: dict[tuple[str, str], _Model] = {}

    def ratios(self) -> dict[tuple[str, ...], float]:
        """Use over target, by model and role."""
        return {
            (model, _NAMES[role]): figure
            for (model, _), known in self._models.items()
            for role, figure in known.figures.items()
        }

    def said(self) -> str:
        """Figures of all models, and for how long they call for a move."""
        return "; ".join(filter(None, map(self._said, self._models.items())))

    def _said(self, named: tuple[tuple[str, str], _Model]) -> str:
        (name, _), model = named
        held_s = model.looked_s - (model.since_s or model.looked_s)
        wanted = f", {_NAMES[model.wanted]} wanted for {held_s:.0f} s" if model.wanted else ""
        return f"{name}: {_figures(model)} of their targets{wanted}" if model.figures else ""

    def look(
        self, now_s: float, members: Sequence[WorkerLink], queued: Mapping[str, int]
    ) -> list[Move]:
        """Workers that should change now, at most one of a model.

        Args:
            now_s: a clock's time.
            members: the attached workers.
            queued: what waits in this router, by the name of the model.
        """
        models = {one.model for one in members}
        self._models = {name: self._models.get(name, _Model()) for name in models}
        moves = []
        for name, model in self._models.items():
            own = [one for one in members if one.model == name]
            self._measure(now_s, model, own, queued.get(name[0], 0))
            if (move := self._move(now_s, model, own)) is not None:
                moves.append(move)
        return moves

    def _measure(self, now_s: float, model: _Model, own: Sequence[WorkerLink], queued: int) -> None:
        roles = {one.worker_id: (one.identity.role, one.next_role) for one in own}
        both = roles.keys() & model.roles.keys()
        if any(roles[name] != model.roles[name] for name in both):
            model.changed_s = now_s
        model.roles = roles
        passed_s = now_s - model.looked_s
        pools = {role: [one for one in own if one.identity.role == role] for role in _NAMES}
        now = {
            PREFILL: _prefill_use(model.computed, pools[PREFILL], passed_s, self._thresholds),
            DECODE: _decode_use(pools[DECODE], queued, self._thresholds),
        }
        model.computed = {one.worker_id: one.estimate.load.computed_prompt_tokens for one in own}
        model.looked_s = now_s
        weight = 1 - math.exp(-passed_s / MEAN_S)
        for role, figure in now.items():
            if not pools[role]:
                model.figures.pop(role, None)
            elif figure is not None:
                before = model.figures.get(role, figure)
                model.figures[role] = before + weight * (figure - before)

    def _move(self, now_s: float, model: _Model, own: Sequence[WorkerLink]) -> Move | None:
        limits, figures = self._thresholds, model.figures
        wanted = next(
            (
                role
                for role, other in ((PREFILL, DECODE), (DECODE, PREFILL))
                if figures.get(role, 0.0) > limits.high and figures.get(other, 1.0) < limits.low
            ),
            0,
        )
        if wanted != model.wanted:
            model.wanted, model.since_s = wanted, now_s
        is_held = model.since_s is not None and now_s - model.since_s >= limits.hold_s
        if not (wanted and is_held and now_s - model.changed_s >= limits.apart_s):
            return None
        if any(one.gave_up_on or one.next_role or one.asked.role for one in own):
            return None
        return self._choice(PREFILL if wanted == PREFILL else DECODE, model, own)

    def _choice(
        self,
        wanted: worker_pb2.WorkerRole.ValueType,
        model: _Model,
        own: Sequence[WorkerLink],
    ) -> Move | None:
        """The worker that has the least to end, of a pool that can do without one."""
        giving = DECODE if wanted == PREFILL else PREFILL
        pool = [one for one in own if one.identity.role == giving and not one.draining]
        may = [one for one in pool if one.flexible and self._leads(one)]
        if not may or len(pool) < 2:
            return None
        taking = sum(one.identity.role == wanted for one in own)
        left = model.figures[giving] * len(pool) / (len(pool) - 1)
        sent_more = left * (taking + 1) / max(1, taking)
        if left > 1 or sent_more >= model.figures[wanted]:
            return None
        least = min(may, key=_to_end)
        why = f"{_figures(model)} of their targets for {self._thresholds.hold_s:g} s"
        return Move(least.worker_id, wanted, why)

    def _leads(self, link: WorkerLink) -> bool:
        return link.estimate.load.balancer == self._router


def _figures(model: _Model) -> str:
    return ", ".join(f"{_NAMES[role]} at {at:.2f}" for role, at in sorted(model.figures.items()))


def _prefill_use(
    before: dict[str, int], pool: Sequence[WorkerLink], passed_s: float, limits: Thresholds
) -> float | None:
    """Use over target; None while unknown."""
    busy = []
    for one in pool:
        load = one.estimate.load
        if one.worker_id not in before:
            continue
        tokens = load.computed_prompt_tokens - before[one.worker_id]
        if tokens and not load.prefill_tokens_per_s:
            continue  # Prompts so short that no step measured its rate.
        busy.append(min(1.0, tokens / load.prefill_tokens_per_s / passed_s) if tokens else 0.0)
    return sum(busy) / len(busy) / limits.prefill if busy else None


def _decode_use(pool: Sequence[WorkerLink], queued: int, limits: Thresholds) -> float | None:
    loads = [one.estimate.load for one in pool]
    slots = sum(load.max_sequences for load in loads)
    pages = sum(load.total_pages for load in loads)
    if not slots or not pages:
        return None
    used = sum(load.running_sequences + load.wanted_sequences for load in loads)
    free = sum(load.free_pages + load.evictable_pages - load.wanted_pages for load in loads)
    if used >= slots or free <= 0:  # Requests in the queue wait for this pool.
        used += queued
    filled = max(used / slots, (pages - free) / pages)
    return max(filled, filled * (1 + FULL_KV) / (1 + FULL_KV * filled)) / limits.decode


def _to_end(link: WorkerLink) -> tuple[int, str]:
    load = link.estimate.load
    return load.running_sequences + load.queued_prefill_tokens, link.worker_id
