"""Tests the KV transport: two transfer agents in this process push pages to each other.

Workers run the same test when they meet (`kv_transfer.peers`), so they will find the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from console.doctor.finding import Finding, error, ok, warning

PAGE_BYTES: Final = 1 << 20
"""Large enough that the rate is that of the bytes, not of the descriptors."""
NUM_PAGES: Final = 4
"""Pages of each pool: 4 MiB, so that the test takes no time where the path works."""
TIMEOUT_S: Final = 10.0
"""Long enough for a busy machine: a push of 4 MiB takes milliseconds."""
SLOW_GIGABYTES_PER_S: Final = 0.2
"""A page of an 8B model, 2 MiB, would take 10 ms: longer than a decode step."""


def check_path() -> Iterator[Finding]:
    """Measures the transport between two agents on this host."""
    try:
        import torch  # noqa: F401 - the code below needs it

        from kv_transfer.types import TransportError
    except ImportError:
        return  # Another check has reported it already.
    try:
        transport, gigabytes_per_s, latency_us = _measure()
    except TransportError as failed:
        advice = "workers could not exchange KV here: see what stands above about nixl and UCX_TLS"
        yield error("self-test", f"failed: {failed.cause}", advice)
        return
    found = f"{transport}, {gigabytes_per_s:.1f} GB/s, {latency_us:.0f} us a page, host memory"
    if not gigabytes_per_s:
        yield error("self-test", f"{transport}: nothing arrived within {TIMEOUT_S:.0f} s", _BUSY)
    elif gigabytes_per_s < SLOW_GIGABYTES_PER_S:
        yield warning("self-test", found, _BUSY)
    else:
        yield ok("self-test", found)


_BUSY: Final = "is the machine busy? else look at what stands above about UCX_TLS and ptrace"


def _measure() -> tuple[str, float, float]:
    """Returns path, GB/s and microseconds; zeros if it took too long. Raises TransportError."""
    import torch

    from kv_transfer.events import PeerFailed, PeerOpened, TransferCounters, TransferEvent
    from kv_transfer.exchange import Exchange
    from kv_transfer.transports.factory import make_transport
    from kv_transfer.types import PageGroup, TransportError

    heard: list[TransferEvent] = []
    transports, exchanges = [], []
    for name in ("doctor-a", "doctor-b"):
        pool = torch.zeros((NUM_PAGES, PAGE_BYTES), dtype=torch.uint8)
        transport = make_transport("nixl", name, pool, [PageGroup(PAGE_BYTES, NUM_PAGES)])
        transports.append(transport)
        exchanges.append(Exchange(transport, 1, heard.append, TransferCounters()))
    exchanges[0].meet(transports[1].endpoint)
    exchanges[1].meet(transports[0].endpoint)
    path, best = "nixl", PeerOpened("", "nixl", 0.0)
    deadline_s = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < deadline_s:
            for exchange in exchanges:
                exchange.turn()
            for event in heard:
                if isinstance(event, PeerFailed):
                    raise TransportError(event.cause, event.agent_name)
                if isinstance(event, PeerOpened):
                    path, best = event.transport, event
            if best.gigabytes_per_s and not any(one.pushes_in_progress for one in exchanges):
                break
        return path, best.gigabytes_per_s, best.latency_us
    finally:
        for exchange, transport in zip(exchanges, transports, strict=True):
            exchange.close()
            transport.shutdown()
