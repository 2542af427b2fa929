"""What is around the workers fails: their router dies or stands still, a client stands still, a
host's clock is set."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import debian
import pytest
from cluster import running, spawn
from nursery import fork
from scraping import SETTLED_S
from streams import prompt_of, read
from tiny_models import write_tiny_model

from console.tracing.traces import fetch

HOUR_S = 3600


class Clock:
    """What decode-0's wall clock is ahead of all others, from now on."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "offset"
        self.set(0)
        self.environment = {}
        if compiler := shutil.which("cc"):
            library = folder / "clock.so"
            source = Path(__file__).with_name("jumping_clock.c")
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True
            )
            self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._file)}

    def set(self, ahead_s: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(ahead_s.to_bytes(8, "little", signed=True))


@pytest.fixture(scope="module")
def clock(tmp_path_factory):
    return Clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, clock):
    tiny = write_tiny_model(tmp_path_factory.mktemp("model"), max_positions=4096)

    def launch_beside_the_clock(argv, environment, log):
        if "decode-0" in argv:
            return spawn(argv, {**environment, **clock.environment}, log)
        return fork(argv, environment, log)

    with running(
        tiny,
        tmp_path_factory.mktemp("logs"),
        trace=True,
        failpoints="live",
        launch=launch_beside_the_clock,
    ) as cluster:
        yield cluster


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_a_clock_that_is_set_mid_request_changes_nothing(cluster, clock, jump_s):
    """Deadlines are counted on steady clocks; a span that the jump falls into ends no earlier than
    it began."""
    debian.program("cc")  # It compiles what sets the clock.
    clock.set(0)
    options = {"temperature": 0.9, "seed": 3, "max_tokens": 200}
    with cluster.client() as client:
        want = read(client, prompt_of(60), **options)
        want.end()
        with slow_steps(cluster):
            reading = read(client, prompt_of(60), **options)
            reading.until(30)
            clock.set(jump_s)
        reading.end()
        assert reading.error is None, reading.error
        assert reading.tokens() == want.tokens()
        admin, trace_id = cluster.plan.admin_address, reading.generation.trace_id
        trace = fetch(admin, trace_id, patience_s=SETTLED_S)
        again = client.generate(token_ids=prompt_of(61), max_tokens=8, ignore_eos=True)
        assert len(again.token_ids) == 8
    theirs = [span for span in trace.spans if span.instance == "decode-0"]
    assert theirs
    assert all(span.end_ns >= span.start_ns for span in trace.spans)
    longest_s = max(span.end_ns - trace.start_ns for span in theirs) / 1e9
    assert (longest_s > HOUR_S / 2) == (jump_s > 0), "the clock did not jump"
    clock.set(0)
    cluster.check_baseline()


@contextmanager
def slow_steps(cluster, step_s: float = 0.02) -> Iterator[None]:
    """Meanwhile a token takes so long."""
    cluster.slow_down("decode-0", step_s=step_s)
    try:
        yield
    finally:
        cluster.arm("decode-0", "")


def test_a_router_that_stood_still_goes_on_where_it_was(cluster):
    """Its workers gave it up and freed the pages; what was sent is forced when it is back."""
    options = {"temperature": 0.9, "seed": 3, "max_tokens": 300}
    failovers = cluster.metric("baton_failovers_total")
    with cluster.client() as client:
        want = read(client, prompt_of(60), **options)
        want.end()
        with slow_steps(cluster, 0.05):  # longer in all than it takes to give up a router
            reading = read(client, prompt_of(60), **options)
            reading.until(20)
            cluster.kill("router", signal.SIGSTOP)
            try:
                cluster.check_baseline()
            finally:
                cluster.kill("router", signal.SIGCONT)
        reading.end()
    assert reading.error is None, reading.error
    assert reading.tokens() == want.tokens()
    assert cluster.metric("baton_failovers_total") > failovers, "it did not stand long enough"
    cluster.check_baseline()
