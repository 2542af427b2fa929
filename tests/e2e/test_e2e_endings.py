"""However a request ends, everything comes back; however a worker dies, the client is told."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from cluster import running
from streams import prompt_of
from waiting import wait_until

from baton.errors import BatonError


@pytest.fixture(scope="module")
def cluster(tiny, tmp_path_factory):
    settings = {"num_pages": 1100, "max_step_tokens": 64, "resume_grace_s": 1, "failpoints": "live"}
    logs = tmp_path_factory.mktemp("logs")
    with running(tiny, logs, local_prefill="never", **settings) as cluster:
        yield cluster


def test_cancelling_at_any_time_gives_every_page_back(cluster):
    """From a request that has hardly arrived to one deep in its decoding."""
    with cluster.client() as client:
        for i in range(20):
            stream = client.stream(
                token_ids=prompt_of(10 + 60 * i, seed=i),
                max_tokens=2000,
                temperature=0.0,
                ignore_eos=True,
            )
            time.sleep(0.008 * i)
            stream.close()
        cluster.check_baseline()
        for tokens in (1, 2, 30):
            with client.stream(
                token_ids=prompt_of(200), max_tokens=2000, temperature=0.0, ignore_eos=True
            ) as stream:
                seen = 0
                for delta in stream:
                    seen += len(delta.token_ids)
                    if seen >= tokens:
                        break
        cluster.check_baseline()
        result = client.generate(token_ids=prompt_of(50), max_tokens=8, ignore_eos=True)
        assert len(result.token_ids) == 8


def test_a_client_that_vanishes_frees_everything(cluster):
    client = cluster.client()
    for i in range(6):
        iter(client.stream(token_ids=prompt_of(300, seed=i), max_tokens=5000, ignore_eos=True))
    time.sleep(0.5)
    client.close()
    cluster.check_baseline()


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_killed_worker_is_told_within_seconds_and_its_successor_serves(cluster, victim):
    outcome: dict[str, object] = {}
    cluster.slow_down(victim, step_s=0.03)
    with cluster.client() as client:

        def consume() -> None:
            try:
                with client.stream(
                    token_ids=prompt_of(6000 if victim == "prefill-0" else 50),
                    max_tokens=8000,
                    temperature=0.0,
                    ignore_eos=True,
                    timeout_s=60,
                ) as stream:
                    for _ in stream:
                        outcome["streaming"] = True
            except BatonError as error:
                outcome["error"] = error
            outcome["at"] = time.monotonic()

        def under_way() -> bool:
            if victim == "decode-0":
                return "streaming" in outcome
            return cluster.load(victim).queued_prefill_tokens > 0

        reader = threading.Thread(target=consume)
        reader.start()
        wait_until(under_way)
        killed = time.monotonic()
        cluster.kill(victim, signal.SIGKILL)
        reader.join(10)
        assert not reader.is_alive(), "the client hears nothing"
        assert outcome["at"] - killed < 3.0
        error = outcome["error"]
        assert isinstance(error, BatonError)
        expected = {
            "prefill-0": ("UNAVAILABLE", "WORKER_LOST"),
            "decode-0": ("ABORTED", "WORKER_LOST_MID_STREAM"),
        }[victim]
        assert (error.code.name, error.reason) == expected
        cluster.start(victim)
        cluster.wait_ready()
        result = client.generate(token_ids=prompt_of(50), max_tokens=8, ignore_eos=True)
        assert len(result.token_ids) == 8
    cluster.check_baseline()
