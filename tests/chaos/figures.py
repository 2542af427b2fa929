"""What many runs say together: how soon losses were seen, what they cost, and what went wrong."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from chaos.arena import Blow
from chaos.checker import Reference, Violation, comparable
from chaos.history import History
from chaos.plan import RunPlan

ATTRIBUTED_S = 8.0
"""A loss that the router sees later than this after a blow, or after the worker's next one, is not
due to it."""
LEAST_STALL_S = 0.05


@dataclass
class Figures:
    """Sums over runs."""

    runs: int = 0
    requests: int = 0
    tokens: int = 0
    tokens_compared: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    leaks: int = 0
    fetches: Counter[str] = field(default_factory=Counter)
    """Outcomes of fetches, as far as the processes that made them were alive at the end."""
    first_token_quiet_s: list[float] = field(default_factory=list)
    first_token_struck_s: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    """Gaps of finished streams into which a blow to a worker fell, none of the ordinary ones."""
    detected_s: dict[str, list[float]] = field(default_factory=dict)

    def add(
        self,
        plan: RunPlan,
        histories: Sequence[History],
        references: Mapping[int, Reference],
        violations: Sequence[Violation],
        left: Sequence[str],
        blows: Sequence[Blow],
        fired: Counter[str],
    ) -> None:
        """Counts a run."""
        self.runs += 1
        self.requests += len(histories)
        self.faults.update(fault.kind for fault in plan.faults)
        self.fired.update(+fired)
        self.violations.update(violation.rule for violation in violations)
        self.leaks += len(left)
        for history in histories:
            self._add_history(history, references[history.ask.number], plan, blows)

    def detect(self, blows: Sequence[Blow], router_log: Path) -> None:
        """Reads from the router's log how soon it saw each blow."""
        losses = _losses(router_log)
        for blow in blows:
            later = [b.at_unix_s for b in blows if b.name == blow.name]
            until = min((at for at in later if at > blow.at_unix_s), default=math.inf)
            until = min(until, blow.at_unix_s + ATTRIBUTED_S)
            seen = [at for name, at in losses if name == blow.name and blow.at_unix_s <= at < until]
            if seen:
                self.detected_s.setdefault(blow.kind, []).append(min(seen) - blow.at_unix_s)

    @classmethod
    def read(cls, files: Sequence[Path]) -> Figures:
        """The sum of what `write` wrote."""
        figures = cls()
        for file in files:
            for name, value in json.loads(file.read_text())["raw"].items():
                match getattr(figures, name):
                    case Counter() as counter:
                        counter.update(value)
                    case list() as values:
                        values += value
                    case dict() as by_kind:
                        for kind, seconds in value.items():
                            by_kind.setdefault(kind, []).extend(seconds)
                    case int(count):
                        setattr(figures, name, count + value)
        return figures

    def write(self, file: Path, **more: object) -> None:
        """The summary, and what `read` needs to sum it up with others."""
        everything = {**more, **self.summary(), "raw": vars(self)}
        file.write_text(json.dumps(everything, indent=1) + "\n")

    def summary(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "runs": self.runs,
            "requests": self.requests,
            "tokens": self.tokens,
            "tokens_compared": self.tokens_compared,
            "faults": dict(self.faults.most_common()),
            "failpoints_fired": dict(self.fired.most_common()),
            "statuses": dict(self.statuses.most_common()),
            "wrong_tokens": self.violations["token"],
            "violations": dict(self.violations.most_common()),
            "leaks": self.leaks,
            "fetches": dict(self.fetches.most_common()),
            "detected_ms": {kind: _spread_ms(s) for kind, s in sorted(self.detected_s.items())},
            "first_token_quiet_ms": _spread_ms(self.first_token_quiet_s),
            "first_token_struck_ms": _spread_ms(self.first_token_struck_s),
            "stall_ms": _spread_ms(self.stalls_s),
        }

    def _add_history(
        self, history: History, reference: Reference, plan: RunPlan, blows: Sequence[Blow]
    ) -> None:
        status = history.status
        self.statuses[" ".join(filter(None, (status.code, status.reason))) if status else "-"] += 1
        for number, choice in enumerate(reference):
            got = len(history.tokens(number))
            self.tokens += got
            self.tokens_compared += min(got, comparable(history.ask, choice))
        deltas = [event.at_s for event in history.events if event.kind == "delta"]
        if not deltas or not history.ended_ok:
            return
        struck = [b.at_s for b in blows if b.name != "router"]
        waited = deltas[0] - history.sent_s
        if not plan.faults:
            self.first_token_quiet_s.append(waited)
        elif any(history.sent_s <= at_s <= deltas[0] for at_s in struck):
            self.first_token_struck_s.append(waited)
        if history.ask.behaviour == "read":
            self.stalls_s += _stalls(deltas, struck)


def _stalls(deltas: Sequence[float], struck: Sequence[float]) -> list[float]:
    """The gap of a stream that a blow fell into, where it is none of its ordinary gaps."""
    gaps = [(begin, end) for begin, end in itertools.pairwise(deltas)]
    usual_s = statistics.median(end - begin for begin, end in gaps) if gaps else 0.0
    least_s = max(LEAST_STALL_S, 5 * usual_s)
    return [
        end - begin
        for begin, end in gaps
        if end - begin >= least_s and any(begin <= at_s <= end for at_s in struck)
    ]


def _losses(router_log: Path) -> list[tuple[str, float]]:
    """Workers lost, with Unix times."""
    found = []
    for line in router_log.read_text(errors="replace").splitlines():
        if '"worker lost"' in line:
            record = json.loads(line)
            at = datetime.fromisoformat(record["time"])
            found.append((record["worker"], at.timestamp()))
    return found


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"count": 0}
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)

    return {"count": len(ordered), "p50": at(0.5), "p99": at(0.99), "max": at(1.0)}
