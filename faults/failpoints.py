"""Failpoints: named places in the code where a test makes this process fail.

Only the setting `failpoints` (`BATON_DEBUG_FAILPOINTS`) arms them:

    name=action[:argument][~key][@nth], separated by commas

- action: `kill` (SIGKILL to this process), `stop` (SIGSTOP: it stands still until a SIGCONT),
  `sleep:S` (the thread sleeps S seconds), `hang` (it sleeps for ever), `gil:S` (it sleeps S whole
  seconds with the GIL held, so that no other thread runs), `raise` (it raises an error that the
  place chose).
- key: only hits with this key count. A key is, for example, a prompt's number of tokens or a peer.
- nth: the point fires once, at the nth hit that counts. Without nth it fires at each such hit.
- `live` as an item of its own: the admin port accepts another specification (POST /failpoints) and
  shows how often each point was hit (GET /failpoints).

If none is armed, a hit costs one look into an empty dict.
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
    # Prefill worker, on the event loop unless another thread is named.
    "prefill.submitted": "an attempt came; key: tokens of its prompt",
    "prefill.granted": "its grant came, and is not handled yet",
    "prefill.chunk": "a chunk's step has settled, and its push is not requested yet (step thread); "
    "key: tokens of the prompt",
    "prefill.first_token": "the first tokens are known and not yet sent; key: tokens of the prompt",
    "prefill.grant_wait": "computed KV begins to wait for its grant; `raise`: for 0.1 s at most",
    "prefill.sent": "every push is done, and the router is not told yet",
    # Decode worker, on the event loop.
    "decode.submitted": "an attempt came; key: tokens of its prompt",
    "decode.before_grant": "pages are reserved, and the transfer thread does not expect them yet",
    "decode.grant_timeout": "a grant's lifetime is set; `raise`: to 0.1 s",
    "decode.after_grant": "the grant waits in the stream's outbox",
    "decode.ready": "transfer thread: all pages have landed, and the engine does not know it",
    "decode.delivered": "all pages have landed, and the router does not know it",
    "decode.tokens": "a step's tokens are about to be sent; key: tokens of the prompt",
    "decode.ended": "the last choice ended, and the router is not told yet",
    "decode.quarantined": "a granted attempt was given up",
    # Fetches of pages from another worker, at both, on the event loop.
    "fetch.wanted": "fetcher: pages are held, and the transfer thread does not expect them yet",
    "fetch.asked": "fetcher: the fetch waits in the stream's outbox",
    "fetch.timeout": "fetcher: the time that a fetch may take is set; `raise`: to 0.1 s",
    "fetch.landed": "fetcher: the fetch has ended, and the engine does not know it",
    "fetch.received": "holder: a fetch came, and nothing is held yet",
    "fetch.held": "holder: pages are held, and no push is requested yet",
    "fetch.sent": "holder: every push is done, and the pages are still held",
    # Work stream of any worker, on the event loop.
    "worker.received": "a message of the router is about to be handled; key: its kind; `raise` "
    "ends the stream while the data path lives",
    "worker.wrote": "a message to the router was written; key: its kind, such as first_token",
    # Transfer thread.
    "transfer.path": "something is about to go straight to a peer: a push, a self-test, a "
    "notification; key: the peer's name; `raise`: the path to it is cut",
    "transfer.before_push": "a chunk's pages are about to be posted; `raise`: the path is broken",
    "transfer.before_last_push": "as above, for a transfer's last push",
    "transfer.pushed": "a chunk's write is posted, and its end is not seen yet",
    "transfer.last_pushed": "the last write is posted, and its notification is not sent yet",
    "transfer.done": "every push is done and every notification is sent; `Sent` is not told yet",
    "transfer.chunk_landed": "decode side: a notification came, and is not counted yet",
    "transfer.before_quiesced": "the answer to a quiesce is about to leave; its tombstone is set",
    # Engine.
    "engine.turn": "the step loop begins a turn (step thread)",
    "engine.step": "a step is about to run (the device's thread)",
    "tiers.save": "KV pages are about to be copied into host slots (the lane's thread)",
    "tiers.load": "host slots are about to be copied into KV pages (the lane's thread)",
    # The child process of a store.
    "store.lookup": "objects are about to be looked up",
    "store.load": "objects are about to be read into host slots",
    "store.loaded": "they are read and not checked yet",
    "store.store": "objects are about to be written",
    # A rank other than 0, on its only thread; key: the rank.
    "rank.load": "it is about to load its part of the model",
    "rank.join": "it has loaded, and does not join the others yet",
    "rank.joined": "it has joined them, and is not ready for steps yet",
    "rank.step": "a step came, and nothing of it is done yet",
    "rank.copy": "its part of a copy to or from host memory has not begun (a thread of its own)",
    "rank.push": "its piece of a push's pages is not posted yet",
    "rank.asked": "rank 0 asked what has landed, and has no answer yet",
    # Router, on the event loop.
    "router.received": "a worker's message is about to be handled; key: its kind",
}
"""Every failpoint, with the state of the process at its hit."""

_ITEM: Final = re.compile(
    r"(?P<name>[\w.]+)=(?P<action>kill|stop|hang|raise|sleep|gil)(:(?P<argument>[\d.]+))?"
    r"(~(?P<key>[\w-]+))?(@(?P<nth>[1-9]\d*))?"
)
_HANG_S: Final = 1e6
"""For ever, for a test."""
_HURRIED_S: Final = 0.1
"""As long as a sleep lasts that is told to hurry: the end of a test waits for it."""


class FailpointError(Exception):
    """The error of `raise`, unless the place of the failpoint chose another."""


class FailpointsError(ValueError):
    """A specification is malformed."""


class _Point:
    """One failpoint, in a process with armed failpoints."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.hits = 0
        self.fired = 0
        self._armed: list[tuple[Callable[[Callable[[str], Exception]], None], str, int]] = []
        self._counted: list[int] = []
        self._lock = threading.Lock()

    def arm(self, action: str, argument: float, key: str, nth: int) -> None:
        """Adds an action. An empty `key` fits every key; `nth` 0 means every hit."""

        def act(error: Callable[[str], Exception]) -> None:
            extra = {"failpoint": self.name, "action": action}
            logger.warning("failpoint fires: %s", self.name, extra=extra)
            _act(action, argument, self.name, error)

        self._armed.append((act, key, nth))
        self._counted.append(0)

    def hit(self, key: object, error: Callable[[str], Exception]) -> None:
        """Counts a hit and runs the actions that are due."""
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
_specification = ""


def hit(name: str, key: object = None, error: Callable[[str], Exception] = FailpointError) -> None:
    """Marks a failpoint in the code.

    Args:
        name: one of `POINTS`.
        key: the key of this hit, which a specification can select.
        error: makes the error of `raise` from the point's name.
    """
    if _points:
        _points[name].hit(key, error)


def wait_s(name: str, usual_s: float) -> float:
    """Returns a time to wait: `usual_s`, or 0.1 s if this failpoint is armed with `raise`.

    Tests use it to see the end of a long wait.
    """
    try:
        hit(name)
    except FailpointError:
        return _HURRIED_S
    return usual_s


def arm(specification: str) -> None:
    """Arms the failpoints of a specification and disarms all others. Empty disarms all.

    Raises:
        FailpointsError: the specification is malformed.
    """
    global _points, _live, _specification
    items = [item.strip() for item in specification.split(",") if item.strip()]
    points = {name: _Point(name) for name in POINTS} if items else {}
    for item in items:
        if item != LIVE:
            _arm_item(points, item)
    _points, _live, _specification = points, LIVE in items, specification
    if items:
        logger.warning(
            "FAILPOINTS ARE ARMED: this process fails on purpose",
            extra={"failpoints": specification},
        )


def check(specification: str) -> str:
    """Returns the specification if it is well formed. Raises FailpointsError otherwise."""
    points = {name: _Point(name) for name in POINTS}
    for item in specification.split(","):
        if item.strip() not in ("", LIVE):
            _arm_item(points, item.strip())
    return specification


def specification() -> str:
    """What is armed, for a process that this one starts."""
    return _specification


def is_live() -> bool:
    """Whether the admin port may arm failpoints."""
    return _live


def counts() -> dict[str, tuple[int, int]]:
    """Number of hits and of firings, by failpoint. Empty if none is armed."""
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
            # A PyDLL call does not release the GIL.
            ctypes.PyDLL(None).sleep(max(1, round(argument)))
        case _:
            raise error(name)
