"""What was asked of the router, and every single thing that came back, with its time."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Final, Literal

USUAL_TIMEOUT_S: Final = 30.0
Behaviour = Literal["read", "cancel", "stall"]


@dataclass(frozen=True)
class Ask:
    """One request of a run."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    choices: int = 1
    temperature: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = USUAL_TIMEOUT_S
    start_s: float = 0.0
    """After the begin of the run."""
    behaviour: Behaviour = "read"
    """`cancel`: the client goes away in the middle; `stall`: it stops reading for a while."""
    after_deltas: int = 0
    """When it does so."""
    poison: bool = False
    """A failpoint of this run kills whoever touches a prompt of this length."""
    form: tuple[str, str] = ("", "")
    """The client's option that asks for one, and its text."""
    crash: bool = False
    """Whoever reads its form dies of it."""


@dataclass(frozen=True)
class Event:
    """One thing that the client saw. Times are of `time.monotonic`."""

    kind: Literal["started", "delta", "finished", "status"]
    at_s: float
    choice: int = 0
    index: int = 0
    """Of a delta's first token."""
    tokens: tuple[int, ...] = ()
    finish_reason: str = ""
    output_tokens: int | None = None
    """Of all choices; with the last `finished`."""
    trace_id: str = ""
    code: str = ""
    reason: str = ""
    tokens_sent: int | None = None
    """What a status says of them."""


@dataclass
class History:
    """A request from its begin to whatever came last."""

    ask: Ask
    sent_s: float
    events: list[Event] = field(default_factory=list)
    cancelled_s: float | None = None
    """When the client went away."""
    blind_s: float = 0.0
    """How long the client did not look at what came: it stalled, or its machine stood still."""

    @property
    def status(self) -> Event | None:
        """The first terminal event."""
        return next((event for event in self.events if event.kind == "status"), None)

    @property
    def ended_ok(self) -> bool:
        return self.status is not None and self.status.code == "OK"

    @property
    def trace_id(self) -> str:
        return next((event.trace_id for event in self.events if event.trace_id), "")

    def tokens(self, choice: int) -> list[int]:
        """Everything that came for a choice, in the order of arrival."""
        deltas = (e for e in self.events if e.kind == "delta" and e.choice == choice)
        return [token for delta in deltas for token in delta.tokens]

    def as_json(self) -> dict[str, Any]:
        """For the report of a run that failed; times count from the begin of the request."""
        ask = dataclasses.asdict(self.ask)
        ask["prompt"] = f"{len(self.ask.prompt)} tokens"
        ask["form"] = " ".join(self.ask.form)[:200]
        events = [
            {"at_s": round(event.at_s - self.sent_s, 4), **_told(event)} for event in self.events
        ]
        return {"ask": ask, "trace_id": self.trace_id, "events": events}


def _told(event: Event) -> dict[str, Any]:
    """The fields that say something."""
    fields = dataclasses.asdict(event)
    del fields["at_s"]
    return {name: value for name, value in fields.items() if value not in ("", None, (), 0)}
