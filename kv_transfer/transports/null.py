"""A transport that moves no bytes: decode-only benchmarks, where what is decoded does not matter.

Notifications are delivered within the process, as `LoopbackTransport` does; towards another
process nothing can be opened.
"""

from __future__ import annotations

from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import PageIds


class NullTransport(LoopbackTransport):
    """See the module."""

    name = "null"

    def _move(self, source: PageIds, target_pool: PoolMemory, target: PageIds) -> None:
        """Leaves the target's pages as they are."""
