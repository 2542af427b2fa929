"""Sends the spans of a process to a router's internal port that has TLS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from serving.net.internal_net import ROUTER_NAME, ROUTERS_SCHEME, InternalNet
from telemetry.export import RenewedExporter, otlp_exporter

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

TIMEOUT_S: Final = 5.0
"""Longest time for one batch: spans wait in a bounded queue meanwhile, and the oldest are
dropped."""


def exporter_to_router(net: InternalNet, endpoint: str) -> SpanExporter | None:
    """An exporter that shows this process's certificate; None for receivers of another kind.

    Args:
        net: has the certificate.
        endpoint: `grpcs://HOST:PORT` of a router's internal port, or another receiver.
    """
    address = endpoint.removeprefix(ROUTERS_SCHEME)
    if address == endpoint:
        return None

    def make() -> SpanExporter:
        return otlp_exporter(f"https://{address}", TIMEOUT_S, net.credentials(), ROUTER_NAME)

    return RenewedExporter(make, lambda: net.version)
