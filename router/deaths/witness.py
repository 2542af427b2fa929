"""Lost workers whose end is not proven, and the word of those who saw them end.

Pages that a lost worker may still write stay in quarantine at its peers. A peer on the same host
watches the worker's processes itself (`kv_transfer.transports.processes`). Elsewhere a process on
the worker's host has to say that they have ended: the agent that kept them, or whatever is started
there next under the worker's name. Only what a kernel has told it counts.

Life of a lost worker here:

1. LOST: some of its processes are not proven to have ended. Witnesses are asked about them. A
   router that was started again knows of none that was lost before. But peers whose pages wait for
   its end say so again and again, with the names of its processes (`asked`).
2. PROVEN: all have ended, or an operator says that its hosts have no power (`fence`). Its peers are
   told. One that still asks has not heard it, and is told again.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.worker.v1 import worker_pb2

logger = logging.getLogger(__name__)

MOST_LOST: Final = 256
"""Lost workers that are remembered, and those that are proven gone. The oldest go. A peer whose
pages wait for one of them asks again."""
ASKED_S: Final = 10.0
"""A peer asks every second. What was known by questions alone goes so long after the last one,
seconds: its pages are free, or the peer has ended."""
MOST_ENDED: Final = 256
"""Processes of a worker whose end was told before it was lost. The oldest go. Not tuned."""
MOST_WORKERS: Final = 512
"""Workers of which such processes are remembered. The oldest go. Not tuned."""
MOST_LETTERS: Final = 128
"""Letters of a name. A process's has a boot id, a namespace and two numbers, which are fewer."""
NAMELESS: Final = frozenset({""})
"""Processes of a worker that was asked for without any: nobody is the witness of these."""
_EPOCH: Final = re.compile("[0-9a-f]{16}")
Key = tuple[str, int]


class NotLostError(LookupError):
    """This router knows no such start of a worker as lost."""


@dataclass(slots=True)
class _Lost:
    agent_name: str
    processes: set[str]
    """Processes that are not proven to have ended."""
    since_s: float
    """`time.time`."""
    idle: bool
    """It left in order, with nothing to do: no page waits for it."""
    asked_s: float | None = None
    """`time.monotonic` of the last question; None: this router has lost it itself."""


class Deaths:
    """See the module. Belongs to the running loop.

    Args:
        proven: is told the agent name of each start of a worker that is gone.
    """

    def __init__(self, proven: Callable[[str], None]) -> None:
        self._proven = proven
        self._lost: dict[Key, _Lost] = {}
        self._ended: dict[str, dict[str, None]] = {}
        """Processes by worker."""
        self._gone: dict[Key, None] = {}

    @property
    def unproven(self) -> list[dict[str, object]]:
        """Lost workers, as operators see them: without those that left in order."""
        self._forget()
        return [
            {
                "worker": worker,
                "epoch": f"{epoch:016x}",
                "processes": len(lost.processes),
                "since": lost.since_s,
            }
            for (worker, epoch), lost in self._lost.items()
            if not lost.idle
        ]

    def lost(self, worker: worker_pb2.WorkerIdentity, *, idle: bool = False) -> None:
        """A worker is lost, and nobody knows what of it still runs. `idle`: it left in order, and
        did nothing any more for this router."""
        endpoint = worker.endpoint
        if not endpoint.agent_name:
            return
        processes = {one.process for one in (endpoint, *endpoint.ranks)}
        lost = _Lost(endpoint.agent_name, processes, time.time(), idle)
        self._add((worker.worker_id, worker.epoch), lost)

    def asked(self, agent: str, processes: Sequence[str]) -> bool:
        """A peer waits for the end of a start that is not attached here.

        Args:
            agent: its agent's name.
            processes: its processes, as far as the peer knows them.

        Returns:
            Whether it is proven to be gone, which the peer has not heard then.
        """
        worker, _, epoch = agent.rpartition("-")
        if not _EPOCH.fullmatch(epoch) or not 0 < len(worker) <= MOST_LETTERS:
            return False
        key, now_s = (worker, int(epoch, 16)), time.monotonic()
        if key in self._gone:
            return True
        named = set(processes[:MOST_ENDED]) or NAMELESS
        if (lost := self._lost.get(key)) is None:
            self._add(key, _Lost(agent, set(named), time.time(), idle=False, asked_s=now_s))
            return False
        lost.idle = False
        if lost.asked_s is not None:
            lost.asked_s = now_s
            if lost.processes == NAMELESS:  # Others that ask may know more.
                lost.processes = set(named)
                self._add(key, lost)
        return False

    def ended(self, worker: worker_pb2.WorkerIdentity) -> None:
        """This start is proven to be gone, by this host's kernel."""
        self._remember((worker.worker_id, worker.epoch))

    def attached(self, worker: worker_pb2.WorkerIdentity) -> None:
        """This start lives."""
        key = worker.worker_id, worker.epoch
        self._lost.pop(key, None)
        self._gone.pop(key, None)

    def witness(self, worker_id: str, host: str, ended: Sequence[str]) -> list[str]:
        """Takes what a process of that worker has seen on its host.

        Returns:
            The processes of lost starts of the worker there of which nothing is known.
        """
        here = [process for process in ended if _is_on(process, host)]
        if here and len(worker_id) <= MOST_LETTERS:
            known = self._ended[worker_id] = self._ended.pop(worker_id, {}) | dict.fromkeys(here)
            _keep_last(known, MOST_ENDED)
            _keep_last(self._ended, MOST_WORKERS)
        self._forget()
        own = [key for key in self._lost if key[0] == worker_id]
        for key in own:
            self._lost[key].processes -= set(here)
            self._look(key)
        left = {one for key in own if key in self._lost for one in self._lost[key].processes}
        return sorted(one for one in left if _is_on(one, host))

    def fence(self, worker_id: str, epoch: int) -> None:
        """An operator says that nothing of this start of a worker runs any more.

        Raises:
            NotLostError: it is not lost here, or was never heard of.
        """
        key = worker_id, epoch
        if key not in self._lost:
            raise NotLostError
        logger.warning("fenced", extra={"worker": worker_id, "epoch": f"{epoch:016x}"})
        self._end(key)

    def _add(self, key: Key, lost: _Lost) -> None:
        lost.processes -= self._ended.get(key[0], {}).keys()
        self._lost[key] = lost
        self._look(key)
        if len(self._lost) > MOST_LOST:
            oldest = next(iter(self._lost))
            spare = (key for key, one in self._lost.items() if one.idle or one.asked_s)
            del self._lost[next(spare, oldest)]

    def _look(self, key: Key) -> None:
        if not self._lost[key].processes:
            logger.info("all processes have ended", extra={"worker": key[0]})
            self._end(key)

    def _end(self, key: Key) -> None:
        self._remember(key)
        self._proven(self._lost.pop(key).agent_name)

    def _remember(self, key: Key) -> None:
        self._gone[key] = None
        _keep_last(self._gone, MOST_LOST)

    def _forget(self) -> None:
        old_s = time.monotonic() - ASKED_S
        for key in [key for key, one in self._lost.items() if one.asked_s and one.asked_s < old_s]:
            del self._lost[key]


def _is_on(process: str, host: str) -> bool:
    """Whether that names a process of a host: nobody sees what happens on another one, and what has
    no name is on none (`kv_transfer.transports.processes`)."""
    parts = process.split("/") if len(process) <= MOST_LETTERS else ()
    return len(parts) == 4 and all(parts) and host == "/".join(parts[:2])


def _keep_last(kept: dict[Any, Any], most: int) -> None:
    """Drops the first entries until there are no more than so many."""
    while len(kept) > most:
        del kept[next(iter(kept))]
