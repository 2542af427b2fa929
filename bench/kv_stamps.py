"""Where the time of a push through a channel goes, by the host's clock: `bench.kv_wire --stamps`.

What the two ends do is stamped where they do it, in both processes; pushes follow each other, so a
stamp belongs to the push during which it was taken (the end's own, of the one before, excepted: the
receiver may come to them once the sender has gone on). In us since the push began, medians:

    told            the sender has told of the push
    heard           the receiver's thread knows of it: it has woken up
    sent            the first piece is gathered and sent as far as the host is concerned
    posted          the first receive is queued: the wire can begin
    first           the first piece was there, and its scatter is queued
    last            the last one's is
    landed          all is in the pool, and the receiver begins to tell of it
    seen            the sender knows
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kv_transfer.nccl.channels import ReceiveChannel, SendChannel
from kv_transfer.nccl.wire import Wire

Stamps = list[tuple[str, float]]
"""What was done, and when: by `time.perf_counter`, which the processes of a host share."""
Span = tuple[float, float]
_DONE: Sequence[tuple[type, str, str]] = (
    (Wire, "tell_push", "told"),
    (Wire, "next_push", "heard"),
    (Wire, "tell_landed", "landed"),
    (SendChannel, "_move", "sent"),
    (ReceiveChannel, "_move", "posted"),
    (ReceiveChannel, "_scatter", "scattered"),
)


def take() -> Stamps:
    """From now on, of all channels of this process."""
    taken: Stamps = []
    for owner, method, done in _DONE:
        setattr(owner, method, _stamped(getattr(owner, method), done, taken))
    return taken


def _stamped(inner: Callable[..., Any], done: str, taken: Stamps) -> Callable[..., Any]:
    def stamped(*arguments: Any) -> Any:
        began_s = time.perf_counter()
        result = inner(*arguments)
        # Who is told of the end may go on before this thread does.
        taken.append((done, began_s if done == "landed" else time.perf_counter()))
        return result

    return stamped


def table(pushes: Mapping[str, Sequence[Span]], stamps: Stamps) -> str:
    """A line for each way that has stamps.

    Args:
        pushes: by way, when each began and ended.
        stamps: of both processes.
    """
    lines = []
    for way, spans in pushes.items():
        rows = [row for row in (_of_push(span, stamps) for span in spans) if row]
        if rows:
            medians = {done: statistics.median(row[done] for row in rows) for done in rows[0]}
            shown = "  ".join(f"{done} {1e6 * at_s:4.0f}" for done, at_s in medians.items())
            lines.append(f"{way:24} {shown} us, {len(rows)} pushes")
    return "\n".join(lines)


def _of_push(span: Span, stamps: Stamps) -> dict[str, float]:
    began_s, ended_s = span
    at: dict[str, list[float]] = {}
    for done, at_s in stamps:
        if began_s <= at_s <= ended_s:
            at.setdefault(done, []).append(at_s - began_s)
    if len(at) < len(_DONE):
        return {}
    first = {done: min(at[done]) for done in ("told", "heard", "sent", "posted")}
    scattered = [at_s for at_s in at["scattered"] if at_s > first["posted"]]
    landed = max(at["landed"])
    if not scattered or landed < first["posted"]:
        return {}
    ends = {"first": scattered[0], "last": scattered[-1], "landed": landed}
    return {**first, **ends, "seen": ended_s - began_s}
