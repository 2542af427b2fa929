"""How ranks that do things together meet: a place for each other's addresses, and their own one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist

_dist: Any = dist
LOOPBACK: Final = "127.0.0.1"


class Meeting(NamedTuple):
    """The meeting of one group of ranks, as one of them has it."""

    store: Any
    """torch's, of this group alone."""
    name: str
    """No other group of this process had it."""
    address: str = LOOPBACK
    """Address of this host. The rank listens there, and nowhere else."""
    interface: str = "lo"
    """Network interface that has it."""

    @property
    def on_one_host(self) -> bool:
        """Whether all of its ranks are on this host."""
        return self.address == LOOPBACK


def meeting_in(file: Path, size: int) -> Meeting:
    """A meeting of ranks of this host, in a file that does not exist yet, the same for all."""
    return Meeting(_dist.FileStore(str(file), size), str(file))
