"""Failpoints: named places in the code where a test makes this process fail.

The setting `failpoints` (`BATON_DEBUG_FAILPOINTS`) arms them, and nothing else does:

    name=action[:argument][~key][@nth], separated by commas

- action: `kill` (SIGKILL to this process), `stop` (SIGSTOP: it stands until a SIGCONT), `sleep:S`
  (the thread sleeps S seconds), `hang` (it sleeps for ever), `gil:S` (it sleeps S whole seconds
  with the GIL held, so that no other thread runs), `raise` (an error that the place chose).
- key: only a hit with this key counts, such as a prompt of so many tokens or a peer.
- nth: fires at the nth hit that counts, once; without it, at every one of them.
- `live` as an item of its own: the admin port takes another specification (POST /failpoints), and
  tells how often each point was hit (GET /failpoints).

Not armed, a hit costs one look at an empty dict.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

logger = logging.getLogger(__name__)

LIVE: Final = "live"
POINTS: Final[Mapping[str, str]] = {
    # Prefill worker, on the event loop unless said otherwise.
    "prefill.submitted": "an attempt came; key: tokens of its prompt",
    "prefill.granted": "its grant came, and nothing is done with it yet",
    "prefill.chunk": "a chunk's step has settled, its push is not asked for yet (step thread); "
    "key: tokens of the prompt",
    "prefill.first_token": "the first tokens are known and not yet told; key: tokens of the prompt",
    "prefill.grant_wait": "how long computed KV waits for its grant; `raise`: a tenth of a second",
    "prefill.sent": "every push is done, the router not told yet",
    # Decode worker, on the event loop.
    "decode.submitted": "an attempt came; key: tokens of its prompt",
    "decode.before_grant": "pages are reserved, the transfer thread does not expect them yet",
    "decode.grant_timeout": "how long a grant lasts is settled; `raise`: a tenth of a second",
    "decode.after_grant": "the grant waits in the stream's outbox",
    "decode.delivered": "all pages have landed, and neither engine nor router know it",
    "decode.tokens": "a step's tokens are about to be told; key: tokens of the prompt",
    "decode.ended": "the last choice ended, and the router is not told yet",
    "decode.quarantined": "a granted attempt was given up",
    # Work stream of any worker, on the event loop: a message is with the connection.
    "worker.received": "a message of the router is about to be obeyed; key: its kind; `raise` ends "
    "the stream while the data path lives",
    "worker.wrote": "a message to the router was written; key: its kind, such as first_token",
    # Transfer thread.
    "transfer.path": "something is about to go straight to a peer: a push, a self-test, a "
    "notification; key: the peer's name; `raise`: the path to it is cut",
    "transfer.before_push": "a chunk's pages are about to be posted; `raise`: the path is broken",
    "transfer.before_last_push": "as above, for a transfer's last push",
    "transfer.pushed": "a chunk's write is posted and not yet seen to be done",
    "transfer.last_pushed": "the last write is posted; it is notified of when seen done",
    "transfer.done": "every push is done and notified of; `Sent` is not told yet",
    "transfer.chunk_landed": "decode side: a notification came, and is not counted yet",
    "transfer.before_quiesced": "the answer to a quiesce is about to leave, its tombstone is set",
    # Engine.
    "engine.turn": "the step loop begins a turn (step thread)",
    "engine.step": "a step is about to run (the device's thread)",
    # Router, on the event loop.
    "router.received": "a worker's message is about to be obeyed; key: its kind",
}
"""Every failpoint, and what is true when it is hit."""

_ITEM: Final = re.compile(
    r"(?P<name>[\w.]+)=(?P<action>kill|stop|hang|raise|sleep|gil)(:(?P<argument>[\d.]+))?"
    r"(~(?P<key>[\w-]+))?(@(?P<nth>[1-9]\d*))?"
)
_HANG_S: Final = 1e6
_HURRIED_S: Final = 0.1


class FailpointError(Exception):
    """What `raise` raises, where the place of the failpoint has chosen nothing else."""


class FailpointsError(ValueError):
    """A specification that says nothing sensible."""


class _Point:
    """One failpoint of a process where some are armed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hits = 0
        self.fired = 0
        self._armed: list[tuple[Callable[[Callable[[str], Exception]], None], str, int]] = []
        self._counted: list[int] = []
        self._lock = threading.Lock()

    def arm(self, action: str, argument: float, key: str, nth: int) -> None:
        """Adds an action. `key` empty: whatever the key; `nth` 0: every time."""

        def act(error: Callable[[str], Exception]) -> None:
            logger.warning("failpoint fires", extra={"failpoint": self.name, "action": action})
            _act(action, argument, self.name, error)

        self._armed.append((act, key, nth))
        self._counted.append(0)

    def hit(self, key: object, error: Callable[[str], Exception]) -> None:
        """The code passes here."""
        with self._lock:
            self.hits += 1
            due = []
            for index, (act, wanted, nth) in enumerate(self._armed):
                if wanted and wanted != str(key):
                    continue
                self._counted[index] += 1
                if nth in (0, self._counted[index]):
                    due.append(act)
            self.fired += len(due)
        for act in due:
            act(error)


_points: dict[str, _Point] = {}
_live = False


def hit(name: str, key: object = None, error: Callable[[str], Exception] = FailpointError) -> None:
    """The code passes a failpoint.

    Args:
        name: one of `POINTS`.
        key: what a specification can ask for.
        error: makes what `raise` raises, from the point's name.
    """
    if _points:
        _points[name].hit(key, error)


def wait_s(name: str, usual_s: float) -> float:
    """How long something is waited for: as usual, or a tenth of a second where this failpoint is
    armed to `raise`, by a test that wants to see the wait end."""
    try:
        hit(name)
    except FailpointError:
        return _HURRIED_S
    return usual_s


def arm(specification: str) -> None:
    """Arms what the specification says, and nothing else any more; empty disarms everything.

    Raises:
        FailpointsError: it cannot be read.
    """
    global _points, _live
    items = [item.strip() for item in specification.split(",") if item.strip()]
    points = {name: _Point(name) for name in POINTS} if items else {}
    for item in items:
        if item != LIVE:
            _arm_item(points, item)
    _points, _live = points, LIVE in items
    if items:
        logger.warning(
            "FAILPOINTS ARE ARMED: this process fails on purpose",
            extra={"failpoints": specification},
        )


def check(specification: str) -> str:
    """The specification, where it can be read. Raises FailpointsError."""
    points = {name: _Point(name) for name in POINTS}
    for item in specification.split(","):
        if item.strip() not in ("", LIVE):
            _arm_item(points, item.strip())
    return specification


def is_live() -> bool:
    """Whether the admin port may arm failpoints."""
    return _live


def counts() -> dict[str, tuple[int, int]]:
    """Per failpoint: how often it was hit, how often it fired. Empty where none is armed."""
    return {name: (point.hits, point.fired) for name, point in _points.items()}


def _arm_item(points: Mapping[str, _Point], item: str) -> None:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise FailpointsError(f"`{item}` is not name=action[:argument][~key][@nth]")
    if found["name"] not in points:
        raise FailpointsError(f"there is no failpoint `{found['name']}`")
    if (found["argument"] is not None) != (found["action"] in ("sleep", "gil")):
        raise FailpointsError(f"`{item}`: seconds belong to sleep and gil, and to nothing else")
    argument = float(found["argument"] or 0)
    points[found["name"]].arm(found["action"], argument, found["key"] or "", int(found["nth"] or 0))


def _act(action: str, argument: float, name: str, error: Callable[[str], Exception]) -> None:
    match action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(argument)
        case "hang":
            time.sleep(_HANG_S)
        case "gil":
            # libc's own sleep, called without the GIL being given up.
            ctypes.PyDLL(None).sleep(max(1, round(argument)))
        case _:
            raise error(name)
