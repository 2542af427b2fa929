"""Streams that are read in threads of their own, while something happens to the workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from cluster import GENERATED_S, Cluster
from waiting import wait_until

from baton.client.clients import Client
from baton.client.generation import Delta, Generation
from baton.errors import BatonError


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(5, 384, length).tolist()


def at_once(ask: Callable[[int], list[int]], numbers: Sequence[int]) -> list[list[int]]:
    """What each number is answered, all asked at once."""
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(ask, numbers, timeout=120))


@dataclass
class Reading:
    """A stream, read in a thread of its own."""

    deltas: list[Delta] = field(default_factory=list)
    generation: Generation | None = None
    error: BatonError | None = None
    longest_gap_s: float = 0.0
    thread: threading.Thread | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)

    def tokens(self, choice: int = 0) -> list[int]:
        """Fails where a token is missing or repeated."""
        found: list[int] = []
        for delta in self.deltas:
            if delta.choice == choice:
                assert delta.first_token_index == len(found)
                found += delta.token_ids
        return found

    def until(self, num_tokens: int) -> None:
        wait_until(lambda: self.error or self.num_tokens >= num_tokens, poll_s=0.002)
        assert self.error is None, self.error

    def end(self) -> None:
        assert self.thread is not None
        self.thread.join(60)
        assert not self.thread.is_alive(), "the stream hangs"


def read(client: Client, prompt: list[int], **options) -> Reading:
    """Starts a stream; 150 tokens, end of sequence or not, unless told otherwise."""
    reading = Reading()

    def consume() -> None:
        options.setdefault("ignore_eos", True)
        options.setdefault("max_tokens", 150)
        options.setdefault("timeout_s", 60)
        last = time.monotonic()
        try:
            with client.stream(token_ids=prompt, **options) as stream:
                for delta in stream:
                    reading.deltas.append(delta)
                    now = time.monotonic()
                    reading.longest_gap_s = max(reading.longest_gap_s, now - last)
                    last = now
                reading.generation = stream.result
        except BatonError as error:
            reading.error = error

    reading.thread = threading.Thread(target=consume)
    reading.thread.start()
    return reading


def busy(cluster: Cluster, role: str) -> str:
    """The worker of that role that runs most."""
    names = [name for name in cluster.workers if name.startswith(role)]
    return max(names, key=lambda name: cluster.load(name).running_sequences)


def bring_back(cluster: Cluster, *names: str) -> None:
    for name in names:
        cluster.start(name)
    cluster.wait_ready()
    for name in names:
        cluster.wait_attached(name)
    cluster.check_baseline()


class Asking(threading.Thread):
    """A thread whose exception is its test's."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._ask = ask
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._ask()
        except BaseException as error:
            self._error = error

    def end(self) -> None:
        self.join(GENERATED_S)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
