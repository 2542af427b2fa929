"""What an endpoint picker of the Gateway API's inference extension reads of each endpoint, which is
a router with its workers: gauges, by the names that it asks for unless it is told others. They are
vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

WAITING: Final = "vllm:num_requests_waiting"
RUNNING: Final = "vllm:num_requests_running"
KV_USE: Final = "vllm:kv_cache_usage_perc"
KV_SIZE: Final = "vllm:cache_config_info"


class EndpointLoad(NamedTuple):
    """The present load of an endpoint."""

    waiting: int
    """Requests of which something is in the router's queue."""
    running: int
    """Requests that workers have, with all of their choices."""
    used_pages: int
    """KV pages of workers that decode which no new request could get."""
    total_pages: int
    page_tokens: int
    """0: there is no worker."""


class EndpointGauges(Collector):
    """Shows the load of an endpoint."""

    def __init__(self, load: Callable[[], EndpointLoad]) -> None:
        self._load = load

    def describe(self) -> Iterable[Family]:
        """Returns the metrics without a load."""
        return [GaugeMetricFamily(name, "") for name in (WAITING, RUNNING, KV_USE, KV_SIZE)]

    def collect(self) -> Iterable[Family]:
        """Returns the present load."""
        load = self._load()
        yield GaugeMetricFamily(WAITING, "Requests in the router's queue.", value=load.waiting)
        yield GaugeMetricFamily(RUNNING, "Requests that workers have.", value=load.running)
        used = load.used_pages / load.total_pages if load.total_pages else 0.0
        yield GaugeMetricFamily(KV_USE, "Share of decode workers' KV pages in use.", value=used)
        size = GaugeMetricFamily(
            KV_SIZE, "KV pages of decode workers.", labels=("block_size", "num_gpu_blocks")
        )
        if load.page_tokens:
            size.add_metric((str(load.page_tokens), str(load.total_pages)), 1)
        yield size
