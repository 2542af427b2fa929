"""Where the ranks of a worker meet: in files of one host, or over the wires of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
import zmq

from engine.eager.meeting import Meeting, meeting_in
from engine.hosts.store import WireStore
from engine.hosts.wires import Ends

_dist: Any = dist
STORE: Final = "store"


class RankMeetings:
    """Meetings of one rank.

    Args:
        folder: the private folder of its host.
        nodes: hosts, of equally many ranks each.
        size: ranks of all.
    """

    def __init__(self, folder: Path, nodes: int, size: int) -> None:
        self._folder = folder
        self._each = size // nodes
        self._ends = Ends(folder)
        self._store: WireStore | None = None
        """torch asks it for as long as the process lives."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        if self._ends.over_hosts:
            self._store = WireStore(self._connect)

    def __call__(self, name: str, ranks: Sequence[int]) -> Meeting:
        """The meeting of a name, and of these ranks, for one of them."""
        file = self._folder / f"{STORE}-{name}"
        hosts = {rank // self._each for rank in ranks}
        if self._store is None or len(hosts) == 1:
            return meeting_in(file, len(ranks))
        store = _dist.PrefixStore(name, self._store)
        return Meeting(store, str(file), self._ends.fabric, self._ends.interface)

    def close(self) -> None:
        """Nobody meets any more. A context that is merely dropped would wait for its sockets."""
        self._context.destroy(linger=0)

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        self._ends.connect(socket, STORE)
        return socket
