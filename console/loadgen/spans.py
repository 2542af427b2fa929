"""Sums up the servers' spans of a run's requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from console.tracing import traces
from telemetry.names import Attr

TRACES_READ: Final = 48
"""Number of requests whose spans are read: the last ones of a run."""
_PATIENCE_S: Final = 1.0
"""For spans that are still on their way: they are sent 200 ms after their end."""


def span_figures(admin: str, trace_ids: Sequence[str]) -> dict[str, Any]:
    """Median and maximum of the duration and of each numeric attribute, by span name.

    Args:
        admin: HOST:PORT of the router's admin port.
        trace_ids: the requests' traces; traces that the router no longer has are skipped.
    """
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    transports = set()
    read = 0
    for trace_id in trace_ids[-TRACES_READ:]:
        try:
            trace = traces.fetch(admin, trace_id, patience_s=_PATIENCE_S)
        except traces.TraceError:
            continue
        read += 1
        for span in trace.spans:
            figures = found[span.name]
            figures["duration_ms"].append(span.duration_ns / 1e6)
            for key, value in span.attributes.items():
                if key == Attr.KV_TRANSPORT:
                    transports.add(str(value))
                elif key.startswith("baton.") and isinstance(value, int | float):
                    figures[key].append(float(value))
    medians = {
        name: {
            key: [round(float(np.median(values)), 3), round(max(values), 3)]
            for key, values in figures.items()
        }
        for name, figures in found.items()
    }
    return {"requests": read, "transports": sorted(transports), "median_and_max": medians}
