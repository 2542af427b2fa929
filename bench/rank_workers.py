"""Workers of unequal ranks: what a hand-off takes, and what the end of a rank costs.

Parts of `bench.ranks`. Prompts of `--context` tokens are handed off one after the other, and none
begins like another. `exposed_ms` is the mean of what the prefill worker measures: from the last
chunk computed to its push done.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
import psutil

from baton.client.clients import Client
from console import up
from engine.model.families import read_config
from telemetry.names import Metric
from worker.settings import Role

PROMPT_TOKENS: Final = 400
"""Of a prompt, unless `--context` says it."""
PROMPTS: Final = 5
LEAST_KV_GIB: Final = 0.25
KV_OF_PROMPTS: Final = 3
"""A pool holds so many prompts: one that is handed off, and some that stay in the prefix cache."""
Say = Callable[[dict[str, Any]], None]


def hand_off(options: argparse.Namespace, say: Say) -> None:
    """Every pair of different ranks."""
    for prefill in options.ranks:
        for decode in options.ranks:
            ranks = {Role.PREFILL: prefill, Role.DECODE: decode}
            tokens = options.context or PROMPT_TOKENS
            ask = partial(_ask, tokens)
            figures = asyncio.run(_with_workers(_plan(options, 1, ranks, tokens), ask))
            line = {"prefill_ranks": prefill, "decode_ranks": decode, "prompt_tokens": tokens}
            say({**line, **figures})


def kill(options: argparse.Namespace, say: Say) -> None:
    """The last rank of a decode worker, of two, dies under a stream."""
    for ranks in options.ranks:
        if ranks > 1:
            plan = _plan(options, 2, {Role.DECODE: ranks}, PROMPT_TOKENS)
            say({"ranks": ranks, **asyncio.run(_with_workers(plan, _kill_under_stream))})


def _plan(
    options: argparse.Namespace, decode: int, ranks: dict[Role, int | None], tokens: int
) -> up.UpPlan:
    what = up.UpOptions(
        model=str(options.model),
        decode=decode,
        tp_of=ranks,
        device=options.device,
        trace=False,
        grpc_port=0,
        http_port=0,
        admin_port=0,
        drain_s=5.0,
        kv_memory_gib=max(LEAST_KV_GIB, KV_OF_PROMPTS * _kv_gib(options, tokens)),
    )
    plan = up.plan(what)
    dummy = {"BATON_DEBUG_LOAD_FORMAT": "dummy"}
    specs = [replace(one, environment={**one.environment, **dummy}) for one in plan.specs]
    return replace(plan, specs=tuple(specs))


def _kv_gib(options: argparse.Namespace, tokens: int) -> float:
    """KV of so many tokens, on one rank alone. Several ranks have room for more of them."""
    config = read_config(options.model)
    number_bytes = 4 if options.device == "cpu" else 2
    numbers = config.num_layers * config.kept.numbers
    return tokens * numbers * number_bytes / (1 << 30)


async def _with_workers(
    plan: up.UpPlan, do: Callable[[up.UpPlan, Any], dict[str, Any]]
) -> dict[str, Any]:
    async with up.running(plan, lambda name, line: None) as supervisor:
        await up.wait_until_ready(plan, supervisor)
        return await asyncio.to_thread(do, plan, supervisor)


def _ask(tokens: int, plan: up.UpPlan, _: Any) -> dict[str, Any]:
    with Client(plan.router_address, timeout_s=300) as client:
        _gaps(client, PROMPTS, tokens)  # The first one meets everything cold.
        before = _exposed(plan)
        gaps = [_gaps(client, seed, tokens) for seed in range(PROMPTS)]
        exposed_s, sent = np.subtract(_exposed(plan), before).tolist()
    figures = {
        "gb_per_s": _metric(plan, "prefill-0", Metric.PEER_BANDWIDTH) / 1e9,
        "first_token_ms": 1e3 * statistics.median(first for first, *_ in gaps),
        "second_token_ms": 1e3 * statistics.median(second for _, second, *_ in gaps),
    }
    if sent:
        figures["exposed_ms"] = 1e3 * exposed_s / sent
    return figures


def _exposed(plan: up.UpPlan) -> tuple[float, float]:
    """Exposed seconds of all hand-offs so far, and their number."""
    total, count = (
        _metric(plan, "prefill-0", f"{Metric.TRANSFER_EXPOSED}_{kind}") for kind in ("sum", "count")
    )
    return total, count


def _gaps(client: Client, seed: int, prompt_tokens: int, tokens: int = 8) -> list[float]:
    """Seconds to the first token and from each to the next."""
    prompt = np.random.default_rng(seed).integers(5, 4000, prompt_tokens).tolist()
    times = [time.perf_counter()]
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    with client.stream(token_ids=prompt, **options) as stream:
        times += [time.perf_counter() for _ in stream]
    return np.diff(times).tolist()


def _kill_under_stream(plan: up.UpPlan, supervisor: Any) -> dict[str, Any]:
    def strike() -> None:
        time.sleep(1.0)
        for name, pid in supervisor.pids().items():
            if name.startswith("decode"):
                _other_ranks(pid)[-1].kill()
                return

    with Client(plan.router_address, timeout_s=300) as client:
        usual_s = max(_gaps(client, 1, PROMPT_TOKENS, 200)[1:])
        striking = threading.Thread(target=strike)
        striking.start()
        gaps: list[float] = []
        while striking.is_alive():
            gaps += _gaps(client, 2, PROMPT_TOKENS, 2000)
        striking.join()
    return {"usual_longest_gap_ms": 1e3 * usual_s, "longest_gap_ms": 1e3 * max(gaps)}


def _other_ranks(pid: int) -> Sequence[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if "engine.ranks" in child.cmdline()]


def _metric(plan: up.UpPlan, worker: str, name: str) -> float:
    """The largest of a metric's samples."""
    address = dict(plan.worker_admin_addresses)[worker]
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    found = [float(line.split()[-1]) for line in text.splitlines() if line.startswith(name)]
    return max(found, default=0.0)
