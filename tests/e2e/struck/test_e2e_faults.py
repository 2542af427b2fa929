"""Faults at the worst moment, made by failpoints inside real workers."""

from __future__ import annotations

import signal
import time

import pytest
from streams import bring_back, prompt_of, read
from waiting import wait_until

from baton.errors import DeadlineError
from struck import DECODES, PREFILLS
from worker.watchdog import EXIT_HUNG

POISONED = 77
"""Prompts of so many tokens kill who decodes them."""


@pytest.mark.parametrize(
    ("names", "failpoint", "seed"),
    [
        pytest.param(PREFILLS, "transfer.before_push=hang@1", 30, id="prefill"),
        pytest.param(DECODES, "transfer.chunk_landed=hang@1", 31, id="decode"),
    ],
)
def test_a_hung_transfer_thread_ends_its_worker_and_no_stream(cluster, names, failpoint, seed):
    """Its steps and its streams go on: nothing else would tell that what it owes never comes."""
    prompt, options = prompt_of(200, seed=seed), {"temperature": 0.0, "max_tokens": 20}
    for name in names:
        cluster.arm(name, failpoint)
    with cluster.client() as client:
        reading = read(client, prompt, **options)
        (victim,) = wait_until(lambda: cluster.fired(*names))
        for name in set(names) - {victim}:
            cluster.arm(name, "")
        reading.end()
        assert reading.error is None, reading.error
        assert cluster.wait_gone(victim) == EXIT_HUNG
        assert "the transfer thread hangs" in (cluster.logs / f"{victim}.log").read_text()
        bring_back(cluster, victim)
        again = client.generate(token_ids=prompt, ignore_eos=True, **options)
        assert tuple(reading.tokens()) == again.token_ids


def test_a_hand_off_that_never_comes_ends_with_its_request(cluster):
    """The decode worker loses what it is notified of, and the prefill worker is done: the grant
    lasts as long as the request."""
    for name in DECODES:
        cluster.arm(name, "transfer.chunk_landed=raise")
    with cluster.client() as client:
        reading = read(client, prompt_of(200, seed=32), timeout_s=5)
        reading.until(1)
        wait_until(lambda: sum(cluster.load(name).granted_pages for name in DECODES))
        reading.end()
        assert isinstance(reading.error, DeadlineError), reading.error
        assert reading.num_tokens == 1
    cluster.check_baseline()
    assert quarantined(cluster) == 0


def test_a_control_path_that_is_cut_costs_no_stream_and_no_page(cluster):
    """A prefill worker loses the router as a grant comes, and lives: nothing is proven of it, and
    it answers for the grant over the data path."""
    cut = "prefill-0"
    lost = losses(cluster, cut, "stream ended")
    cluster.arm(cut, "worker.received=raise~grant@1")
    options = {"temperature": 0.0, "max_tokens": 20}
    with cluster.client() as client:
        prompts = [prompt_of(1200, seed=20 + i) for i in range(4)]
        readings = [read(client, prompt, **options) for prompt in prompts]
        for reading in readings:
            reading.end()
            assert reading.error is None, reading.error
        assert losses(cluster, cut, "stream ended") == lost + 1
        cluster.arm(cut, "")
        cluster.wait_attached(cut)
        cluster.check_baseline()
        assert dead(cluster, cut) == []
        for reading, prompt in zip(readings, prompts, strict=True):
            again = client.generate(token_ids=prompt, ignore_eos=True, **options)
            assert tuple(reading.tokens()) == again.token_ids


def test_a_poison_request_is_not_passed_round_the_pool(cluster):
    """It kills two decode workers and ends then, though more may come, and nobody else with it."""
    for name in DECODES:
        cluster.arm(name, f"decode.tokens=kill~{POISONED}")
    with cluster.client() as client:
        poison = read(client, prompt_of(POISONED), temperature=0.0)
        poison.end()
        assert poison.error is not None
        assert (poison.error.code.name, poison.error.reason) == ("ABORTED", "POISON_REQUEST")
        assert poison.error.metadata["workers_lost"] == "2"
        assert int(poison.error.metadata["tokens_sent"]) == len(poison.tokens())
        for name in DECODES:
            assert cluster.wait_gone(name) == -signal.SIGKILL
        bring_back(cluster, *DECODES)
        result = client.generate(token_ids=prompt_of(50), max_tokens=8, ignore_eos=True)
        assert len(result.token_ids) == 8


def test_a_prefill_worker_stopped_under_a_write_keeps_the_pages_until_it_wakes(cluster):
    """The decode side wants its pages back and asks; silence, and a lapsed lease, are no answer."""
    with cluster.client() as client:
        prompt = prompt_of(1500, seed=6)
        for name in PREFILLS:
            # Steps apart from each other: chunks that wait together go in one push.
            cluster.arm(name, "engine.step=sleep:0.2,transfer.pushed=stop@2")
        reading = read(client, prompt, temperature=0.0, max_tokens=20)
        stopped = wait_stopped(cluster)
        for name in set(PREFILLS) - {stopped}:
            cluster.arm(name, "")
        reading.end()
        assert reading.error is None, reading.error
        assert len(reading.tokens()) == 20
        wait_until(lambda: quarantined(cluster) == -(-1500 // 16))
        for _ in range(4):
            assert quarantined(cluster) == -(-1500 // 16)
            time.sleep(0.5)
        cluster.kill(stopped, signal.SIGCONT)
        cluster.wait_attached(stopped)
        cluster.arm(stopped, "")
        cluster.check_baseline()
        assert quarantined(cluster) == 0


def losses(cluster, name: str, cause: str) -> int:
    """How often the router has lost the worker for that."""
    lines = (cluster.logs / "router.log").read_text().splitlines()
    return sum("worker lost" in line and name in line and cause in line for line in lines)


def dead(cluster, *names: str) -> list[str]:
    return [name for name in names if cluster.processes[name].poll() is not None]


def quarantined(cluster) -> int:
    return sum(cluster.load(name).quarantined_pages for name in DECODES)


def wait_stopped(cluster) -> str:
    """The prefill worker that has stopped itself, as soon as one has."""
    return wait_until(lambda: [name for name in PREFILLS if state_of(cluster, name) == "T"])[0]


def state_of(cluster, name: str) -> str:
    """Of the process, as the kernel says: R, S, T for stopped."""
    with open(f"/proc/{cluster.processes[name].pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
