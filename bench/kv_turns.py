"""Host time of the hand-off between two workers of one rank: what posting and polling cost.

python -m bench.kv_turns [--page-kib 4] [--pages 64] [--times 2000] [--repeats 5]
                         [--transport nixl] [--json FILE]

Two workers' transports and their transfer turns, in one process and on one thread. Microseconds of
wall time, and in brackets of this thread's CPU time, medians over all calls:

    post, 1 run     a push of `pages` adjacent pages
    post, 4 runs    the same in four runs
    push ended      the look that sees its end
    one came        the look that finds its notification
    quiet look      a look that finds nothing
    quiet turn      a whole turn of the transfer thread while a grant is open, without its pause

Pages are small on purpose: on a CPU a push copies its bytes inside the call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from bench.harness import write_json
from kv_transfer.events import TransferCounters
from kv_transfer.exchange import Exchange
from kv_transfer.ranks.build import Others, Run, group_transport
from kv_transfer.specs import Range, ReceiveSpec
from kv_transfer.types import KvTransport, PageIds, PushState

T = TypeVar("T")
RUNS = (1, 4)
WAIT_S = 10.0
UNCOUNTED = 20
NO_GRANT = b"\0" * 16


@dataclass
class Pool:
    """See `kv_transfer.ranks.build.Pool`."""

    data: torch.Tensor
    page_runs: tuple[Run, ...]
    drafts_digest: str = ""


class Times:
    """Wall and CPU time of each call, by name."""

    def __init__(self) -> None:
        self.wall_us: dict[str, list[float]] = defaultdict(list)
        self.cpu_us: dict[str, list[float]] = defaultdict(list)

    def take(self, name: str, call: Callable[[], T]) -> T:
        """Does it, and notes how long it took."""
        cpu_ns, wall_ns = time.thread_time_ns(), time.perf_counter_ns()
        result = call()
        wall_ns = time.perf_counter_ns() - wall_ns
        self.cpu_us[name].append((time.thread_time_ns() - cpu_ns) / 1e3)
        self.wall_us[name].append(wall_ns / 1e3)
        return result

    def medians(self) -> dict[str, tuple[float, float]]:
        """Wall and CPU time in microseconds."""
        return {
            name: (
                statistics.median(wall[UNCOUNTED:]),
                statistics.median(self.cpu_us[name][UNCOUNTED:]),
            )
            for name, wall in self.wall_us.items()
        }


def make(transport: str, name: str, pool: Pool) -> KvTransport:
    """A worker's transport."""
    return group_transport(transport, name, pool, (8,), Others((), lambda: ""))


def in_runs(pages: int, runs: int) -> PageIds:
    """So many pages in runs, with a page between them."""
    size = pages // runs
    return np.concatenate([np.arange(size) + run * (size + 1) for run in range(runs)]).astype(
        np.int32
    )


def until(found: Callable[[], T]) -> T:
    """What a look that is repeated finds."""
    end_s = time.monotonic() + WAIT_S
    while not (result := found()):
        assert time.monotonic() < end_s, "nothing came"
    return result


def measure(arguments: argparse.Namespace, times: Times) -> None:
    """One repeat."""
    page_bytes, num_pages = arguments.page_kib << 10, 2 * arguments.pages
    pools = [
        Pool(
            torch.zeros(num_pages, page_bytes, dtype=torch.uint8),
            ((page_bytes, num_pages, 0, 0, 0, (), ()),),
        )
        for _ in range(2)
    ]
    sender, receiver = (
        make(arguments.transport, f"{side}-{os.getpid()}-{time.time_ns()}", pool)
        for side, pool in zip(("sends", "receives"), pools, strict=True)
    )
    sender.open(receiver.endpoint)
    receiver.open(sender.endpoint)
    push_and_look(arguments, times, sender, receiver)
    quiet_turns(arguments, times, sender, receiver)
    for transport in (sender, receiver):
        transport.shutdown()


def push_and_look(
    arguments: argparse.Namespace, times: Times, sender: KvTransport, receiver: KvTransport
) -> None:
    """Pushes one by one, and looks at both sides."""
    target = receiver.endpoint.agent_name
    for number in range(arguments.times):
        runs = RUNS[number % len(RUNS)]
        pages = in_runs(arguments.pages, runs)
        handle = times.take(
            f"post, {runs} run{'s' * (runs > 1)}",
            partial(sender.push, target, pages, pages, b"x" * 64),
        )
        ended = times.take("push ended", sender.poll_pushes) or until(sender.poll_pushes)
        assert ended == [(handle, PushState.DONE)], ended
        time.sleep(1e-3)  # its notification is there then
        came = times.take("one came", receiver.poll_notifications)
        assert len(came or until(receiver.poll_notifications)) == 1
        times.take("quiet look", receiver.poll_notifications)


def quiet_turns(
    arguments: argparse.Namespace, times: Times, sender: KvTransport, receiver: KvTransport
) -> None:
    """Turns of a receiver with an open grant."""
    exchange = Exchange(receiver, 1, lambda event: None, TransferCounters())
    exchange.meet(sender.endpoint)

    def is_tested() -> bool:
        exchange.turn()
        return not exchange.peers.any_testing

    until(is_tested)
    name = sender.endpoint.agent_name
    exchange.receiver.expect(
        ReceiveSpec(
            transfer_id=NO_GRANT, peer=name, ranges=(Range(0, 8),), num_tokens=128,
            timeout_s=3600.0,
        )
    )  # fmt: skip

    def turn() -> None:
        exchange.pause_s()
        exchange.turn()

    for _ in range(arguments.times):
        times.take("quiet turn", turn)
    exchange.close()


def main() -> None:
    """Prints a line for each kind of call."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page-kib", type=int, default=4)
    parser.add_argument("--pages", type=int, default=64)
    parser.add_argument("--times", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--transport", default="nixl")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    times = Times()
    for _ in range(arguments.repeats):
        measure(arguments, times)
    for name, (wall_us, cpu_us) in times.medians().items():
        print(f"{name:16} {wall_us:8.2f} us ({cpu_us:8.2f})", flush=True)
    write_json(arguments.json, times.medians())


if __name__ == "__main__":
    main()
