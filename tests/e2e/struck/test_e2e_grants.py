"""Grants that are not used up in time, and a decode worker that comes back as another one."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

from cluster import Cluster
from streams import Reading, bring_back, busy, prompt_of, read
from waiting import wait_until

from baton.client.clients import Client
from struck import DECODES, PREFILLS

OPTIONS = {"temperature": 0.0, "max_tokens": 20}


def expired(cluster: Cluster) -> float:
    """Grants, so far."""
    return sum(cluster.metric("baton_kv_grants_expired_total", name) for name in DECODES)


def quarantined(cluster: Cluster) -> int:
    return sum(cluster.load(name).quarantined_pages for name in DECODES)


def stopped(cluster: Cluster) -> list[str]:
    """Prefill workers that have stopped themselves."""

    def state(name: str) -> str:
        stat = Path(f"/proc/{cluster.processes[name].pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    return [name for name in PREFILLS if state(name) == "T"]


def check_again(cluster: Cluster, prompt: list[int], tokens: list[int]) -> None:
    """Nothing is left, and without a fault the answer is the same."""
    cluster.disarm()
    cluster.check_baseline()
    assert quarantined(cluster) == 0
    with cluster.client() as client:
        again = client.generate(token_ids=prompt, ignore_eos=True, **OPTIONS)
    assert tuple(tokens) == again.token_ids


def test_a_grant_that_expires_under_a_write_is_quarantined_until_its_writer_wakes(cluster):
    """The writer is stopped with a push under way: the grant's end frees nothing, and the answer
    does not wait for it."""
    before = expired(cluster)
    with cluster.client() as client:
        prompt, reading = stop_under_a_write(cluster, client)
        reading.end()
    cluster.arm("router", "")
    assert reading.error is None, reading.error
    assert expired(cluster) > before
    asleep = stopped(cluster)
    assert quarantined(cluster) >= -(-len(prompt) // 16)
    for name in asleep:
        cluster.kill(name, signal.SIGCONT)
    for name in asleep:
        cluster.wait_attached(name)
    check_again(cluster, prompt, reading.tokens())


def stop_under_a_write(cluster: Cluster, client: Client) -> tuple[list[int], Reading]:
    """A prompt whose prefill worker has stopped with a push under way. On a busy machine a grant
    may be over before its first push: then once more."""
    for seed in range(100, 120):
        for name in DECODES:
            cluster.arm(name, "decode.grant_timeout=raise@1")
        for name in PREFILLS:
            # The rest of the prompt is late: not all of it may be there when the grant comes.
            cluster.arm(name, "transfer.pushed=stop@1,engine.step=sleep:1@2")
        # The next attempt is not to find the other prefill worker armed as well.
        cluster.arm("router", "router.received=sleep:0.8~failed@1")
        prompt = prompt_of(600, seed=seed)
        reading = read(client, prompt, **OPTIONS)
        wait_until(lambda: stopped(cluster) or reading.generation or reading.error)
        for name in set(PREFILLS) - set(stopped(cluster)):
            cluster.arm(name, "")
        if stopped(cluster):
            return prompt, reading
        reading.end()
        assert reading.error is None, reading.error
    raise AssertionError("no grant lasted until its first push")


def test_a_decode_worker_comes_back_with_a_smaller_pool(cluster):
    """Page ids of the former one mean nothing in it; who writes there has met the new one."""
    prompts = [prompt_of(200, seed=70 + i) for i in range(6)]
    with cluster.client() as client:
        cluster.slow_down(*DECODES)
        reading = read(client, prompts[0], **OPTIONS | {"max_tokens": 200})
        reading.until(10)
        victim = busy(cluster, "decode")
        cluster.disarm()
        cluster.kill(victim)
        smaller = replace(cluster, own={victim: {"BATON_DEBUG_NUM_PAGES": "120"}})
        smaller.start(victim)
        reading.end()
        assert reading.error is None, reading.error
        cluster.wait_attached(victim)
        assert cluster.available_pages(victim) == 119
        other = (set(DECODES) - {victim}).pop()
        cluster.kill(other)
        wait_until(lambda: not cluster.metric("baton_worker_up", worker=other))
        first = [read(client, prompt, **OPTIONS) for prompt in prompts]
        for one in first:
            one.end()
            assert one.error is None, one.error
        wait_until(lambda: cluster.available_pages(victim) == 119, show=cluster.tail)
        cluster.kill(victim)
        bring_back(cluster, *DECODES)
        second = [read(client, prompt, **OPTIONS) for prompt in prompts]
        for one, two in zip(first, second, strict=True):
            two.end()
            assert two.error is None, two.error
            assert one.tokens() == two.tokens()
        assert reading.tokens()[:20] == first[0].tokens()
    cluster.check_baseline()
