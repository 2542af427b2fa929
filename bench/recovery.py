"""How long streams stand still when the decode worker that runs them is killed.

python -m bench.recovery --model FOLDER [--streams 24] [--prompt-tokens 1500] [--prefill 1]

Starts a router, prefill workers and two decode workers here, brings so many streams with prompts
of their own to their 20th token, and kills the decode worker that runs the most. For each stream:
the time from the kill to the next token. The KV of those that the worker ran is computed anew.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from baton.client.clients import Client
from console import up

KILL_AFTER_TOKENS = 20
VOCABULARY = 300
POLL_S = 0.01


class Stream:
    """One request: when each of its tokens came."""

    def __init__(self, index: int, prompt_tokens: int, max_tokens: int) -> None:
        rng = np.random.default_rng(index)
        self._prompt = rng.integers(5, VOCABULARY, prompt_tokens).tolist()
        self._max_tokens = max_tokens
        self.came_s: list[float] = []

    def read(self, client: Client, killed_s: Sequence[float]) -> None:
        """Reads to the first token after the kill; `killed_s` is empty before that."""
        options = {"max_tokens": self._max_tokens, "ignore_eos": True, "timeout_s": 280.0}
        with client.stream(token_ids=self._prompt, **options) as stream:  # type: ignore[arg-type]
            for delta in stream:
                self.came_s += [time.monotonic()] * len(delta.token_ids)
                if killed_s and self.came_s[-1] > killed_s[0]:
                    return

    def stalled_s(self, since_s: float) -> float:
        """From then to the next token."""
        return next(came_s for came_s in self.came_s if came_s > since_s) - since_s


def busiest(plan: up.UpPlan) -> str:
    """The decode worker that runs the most sequences."""
    running = {}
    for name, address in plan.worker_admin_addresses:
        if name.startswith("decode"):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
                lines = page.read().decode().splitlines()
            found = [line for line in lines if line.startswith("baton_running_sequences ")]
            running[name] = float(found[0].split()[1])
    print("running:", running)
    return max(running, key=lambda name: running[name])


def strike(plan: up.UpPlan, pids: dict[str, int], streams: Sequence[Stream]) -> float:
    """Kills the busiest once every stream is under way; returns when."""
    while min(len(stream.came_s) for stream in streams) < KILL_AFTER_TOKENS:
        time.sleep(POLL_S)
    victim = pids[busiest(plan)]
    os.kill(victim, signal.SIGKILL)
    return time.monotonic()


async def measure(arguments: argparse.Namespace) -> None:
    """One run: starts everything, strikes, prints."""
    options = up.UpOptions(
        arguments.model, arguments.prefill, 2, grpc_port=0, http_port=0, admin_port=0, trace=False
    )
    plan = up.plan(options)
    streams = [
        Stream(index, arguments.prompt_tokens, arguments.max_tokens)
        for index in range(arguments.streams)
    ]
    async with up.running(plan, lambda name, line: None) as supervisor:
        await up.wait_until_ready(plan, supervisor)
        with Client(plan.router_address) as client, ThreadPoolExecutor(len(streams)) as pool:
            killed_s: list[float] = []
            reading = [pool.submit(stream.read, client, killed_s) for stream in streams]
            killed_s.append(await asyncio.to_thread(strike, plan, supervisor.pids(), streams))
            for one in reading:
                await asyncio.wrap_future(one)
    report(streams, killed_s[0])


def report(streams: Sequence[Stream], killed_s: float) -> None:
    """Of all streams, those of the other worker, which went on, included."""
    stalls_ms = sorted(1e3 * stream.stalled_s(killed_s) for stream in streams)
    p50, p99 = np.percentile(stalls_ms, [50, 99])
    print(f"{len(streams)} streams: p50 {p50:.0f}, p99 {p99:.0f}, max {stalls_ms[-1]:.0f} ms")
    print("each, ms:", " ".join(f"{stall_ms:.0f}" for stall_ms in stalls_ms))


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=2400)
    parser.add_argument("--prefill", type=int, default=1)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
