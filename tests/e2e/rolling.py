"""Clusters that grow, shrink and are started anew under load, one process after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import openai
from cluster import GENERATED_S, Cluster
from streams import Asking, prompt_of
from waiting import wait_until

from baton.client.clients import Client

OPTIONS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [prompt_of(20 + 37 * n, seed=n) for n in range(6)]


@contextmanager
def load_on(cluster: Cluster, busy: float = 1.0, clients: int = 2) -> Iterator[list[int]]:
    """Clients over gRPC and HTTP that ask on and on; each answer must be the first one's.

    Args:
        cluster: that they ask.
        busy: each waits for an answer in this part of the time. Clients that wait all the time keep
            some process busy all the time.
        clients: of each door.
    """
    over = threading.Event()
    answered: list[int] = []
    with cluster.client(retries=True) as client:
        expected = [client.generate(token_ids=prompt, **OPTIONS) for prompt in PROMPTS]

    def ask_grpc() -> None:
        with cluster.client(retries=True) as client:
            ask_over(client)

    def rest(began_s: float) -> None:
        over.wait((time.monotonic() - began_s) * (1 - busy) / busy)

    def ask_over(client: Client) -> None:
        while not over.is_set():
            began_s, number = time.monotonic(), len(answered) % len(PROMPTS)
            answer = client.generate(token_ids=PROMPTS[number], **OPTIONS)
            assert answer.token_ids == expected[number].token_ids
            answered.append(number)
            rest(began_s)

    def ask_http() -> None:
        url = f"http://{cluster.plan.http_address}/v1"
        with openai.OpenAI(base_url=url, api_key="-", timeout=GENERATED_S) as client:
            while not over.is_set():
                began_s, number = time.monotonic(), len(answered) % len(PROMPTS)
                answer = client.completions.create(
                    model="", prompt=PROMPTS[number], max_tokens=12, temperature=0,
                    extra_body={"ignore_eos": True},
                )  # fmt: skip
                assert answer.choices[0].text == expected[number].text
                answered.append(number)
                rest(began_s)

    threads = [Asking(ask) for ask in (ask_grpc, ask_http) for _ in range(clients)]
    for thread in threads:
        thread.start()
    yield answered
    over.set()
    for thread in threads:
        thread.end()


def wait_for_answers(cluster: Cluster, answered: list[int], count: int = 12) -> None:
    enough = len(answered) + count
    wait_until(lambda: len(answered) >= enough, GENERATED_S, show=cluster.tail)


def start(cluster: Cluster, *names: str) -> None:
    """Starts these, and waits until all that run serve."""
    for name in names:
        cluster.start(name)
    whole = cluster.plan
    running = {name for name, process in cluster.processes.items() if process.poll() is None}
    workers = tuple(one for one in whole.worker_addresses if one[0] in running)
    routers = tuple(one for one in whole.router_admin_addresses if one[0] in running)
    cluster.plan = replace(whole, worker_addresses=workers, router_admin_addresses=routers)
    try:
        cluster.wait_ready()
    finally:
        cluster.plan = whole


def end(cluster: Cluster, name: str) -> None:
    """Drains it; it ends with every request answered."""
    cluster.processes[name].terminate()
    assert cluster.wait_gone(name) == 0, cluster.tail()


def go_through(cluster: Cluster, answered: list[int], steps: Sequence[str]) -> None:
    """Takes the steps one after the other, with answers in between: `+NAME` starts a process,
    `-NAME` ends one, `NAME` does the one after the other."""
    for step in steps:
        name = step.strip("+-")
        wait_for_answers(cluster, answered)
        if not step.startswith("+"):
            end(cluster, name)
            wait_for_answers(cluster, answered)
        if not step.startswith("-"):
            cluster.own = {other: own for other, own in cluster.own.items() if other != name}
            start(cluster, name)
    wait_for_answers(cluster, answered, 24)


GROWING = (
    *("+prefill-1", "+decode-1"),
    *("prefill-0", "decode-0", "router-0", "prefill-1", "decode-1", "router-1"),
    *("-prefill-0", "-decode-0"),
)
"""1P1D -> 2P1D -> 2P2D, everything anew, and back to 1P1D of other workers. Two routers."""
