"""A transport that moves no bytes: decode-only benchmarks, where what is decoded does not matter.

Notifications are delivered within the process, as `LoopbackTransport` does; towards another
process nothing can be opened.
"""

from __future__ import annotations

from kv_transfer.transports.loopback import LoopbackTransport, _Push


class NullTransport(LoopbackTransport):
    """See the module."""

    name = "null"

    def _move(self, push: _Push) -> None:
        """Leaves the target's pages as they are."""
