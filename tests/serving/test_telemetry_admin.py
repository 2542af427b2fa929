"""The admin port, asked over HTTP."""

from __future__ import annotations

import asyncio
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from operators import post_status
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from serving.admin import AdminServer
from telemetry.metrics.router import RouterLoad, RouterMetrics
from telemetry.names import Metric


class Process:
    """One with an admin port."""

    def __init__(self, operator_token: str = "") -> None:
        self.ready = False
        self.metrics = RouterMetrics(lambda: RouterLoad(queued_requests=5))
        self.admin = AdminServer(
            "127.0.0.1:0",
            self.metrics.registry,
            lambda: self.ready,
            [Route("/traces", lambda request: PlainTextResponse("mine"))],
            operator_token,
        )

    async def get(self, path: str, accept: str = "", host: str = "") -> tuple[int, str]:
        def fetch() -> tuple[int, str]:
            headers = {"accept": accept} | ({"host": host} if host else {})
            request = urllib.request.Request(f"http://{self.admin.address}{path}", headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return response.status, response.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, ""

        return await asyncio.to_thread(fetch)


@asynccontextmanager
async def a_process(operator_token: str = "") -> AsyncIterator[Process]:
    made = Process(operator_token)
    await made.admin.start()
    yield made
    await made.admin.stop()


@pytest.fixture
async def process() -> AsyncIterator[Process]:
    async with a_process() as made:
        yield made


async def test_metrics_are_scraped(process: Process) -> None:
    process.metrics.first_token("m", 0.01, 3, "ab" * 16)
    status, page = await process.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert status == 200
    assert families[Metric.QUEUE_DEPTH].samples[0].value == 5
    assert "process_cpu_seconds" in families
    assert "trace_id" not in page
    _, openmetrics = await process.get("/metrics", "application/openmetrics-text; version=1.0.0")
    assert "trace_id" in openmetrics
    assert openmetrics.endswith("# EOF\n")


async def test_health(process: Process) -> None:
    assert (await process.get("/health/live"))[0] == 200
    assert (await process.get("/health/ready"))[0] == 503
    process.ready = True
    assert (await process.get("/health/ready"))[0] == 200


async def test_the_process_adds_pages(process: Process) -> None:
    assert await process.get("/traces") == (200, "mine")
    assert (await process.get("/else"))[0] == 404


async def test_no_web_page_reads_it_by_a_name_of_its_own(process: Process) -> None:
    port = process.admin.address.rpartition(":")[2]
    names = {"evil.example": 403, f"evil.example:{port}": 403, "localhost.evil.example": 403}
    names |= {f"localhost:{port}": 200, "LOCALHOST": 200, f"[::1]:{port}": 200}
    for name, status in names.items():
        for path in ("/metrics", "/traces"):
            assert (await process.get(path, host=name))[0] == status, name


@pytest.mark.parametrize(
    ("token", "shown", "status"),
    [
        ("", "", 403),
        ("", "Bearer ", 403),
        ("secret", "", 403),
        ("secret", "Bearer secre", 403),
        ("secret", "secret", 403),
        ("secret", "Bearer secret", 405),
    ],
)
async def test_who_changes_something_shows_a_token(token: str, shown: str, status: int) -> None:
    async with a_process(token) as process:
        assert await post_status(process.admin.address, shown) == status
        assert (await process.get("/traces"))[0] == 200


async def test_signals_stay_the_process_own(process: Process) -> None:
    got = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, got.set)
    try:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(got.wait(), 5)
        assert (await process.get("/health/live"))[0] == 200
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def test_an_address_in_use_is_said_at_the_start(process: Process) -> None:
    second = AdminServer(process.admin.address, process.metrics.registry)
    with pytest.raises(OSError, match="in use"):
        await second.start()


async def test_stopping_frees_the_port(process: Process) -> None:
    await process.admin.stop()
    again = AdminServer(process.admin.address, process.metrics.registry)
    await again.start()
    await again.stop()
