"""KV pages between two processes, a GPU each: the transports beside the libraries under them.

python -m bench.kv_wire [--page-mib 2 4 8 16] [--run-pages 1] [--total-mib 1024] [--ways ...]
                        [--repeats 8] [--device cuda] [--json FILE]

`total-mib` of pages in one push, GB/s as the sender sees it from posting to the end. Pages are
scattered, in runs of `run-pages` adjacent ones (1: none adjacent on purpose):

    nixl, bare      the library's own calls: a prepared list, one transfer, polled without a pause
    nixl            our transport, polled every 50 us, as a worker does
    nccl            our transport, polled likewise: pages gathered, sent, scattered
    nccl, bare      one contiguous tensor of that size through send and recv

The ways take turns in every repeat; the first two repeats do not count. One layer's K or V of 16
tokens of an 8B GQA model is 0.03125 MiB: a page of that size stands for a cache of one tensor a
layer. On a CPU the bytes go through shared memory, and Gloo stands for NCCL; with
UCX_TLS=tcp,cuda_copy (on a CPU UCX_TLS=tcp) NIXL's go through host memory and TCP.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.harness import write_json
from kv_transfer.nccl.groups import RECEIVER, SENDER, form_group
from kv_transfer.transports.factory import make_transport
from kv_transfer.types import KvTransport, PageGroup, PageIds, PushState
from serving.event_loop import prepare_to_serve

WAYS = ("nixl, bare", "nixl", "nccl", "nccl, bare")
POLL_S = 5e-5
UNCOUNTED = 2
"""The first repeats, which do not count."""
WAIT_S = 60.0


def scattered(rng: np.random.Generator, num_pages: int, count: int, run: int) -> PageIds:
    """`count` pages out of so many, in runs of `run` adjacent ones, the runs in any order."""
    starts = rng.permutation(num_pages // run)[: -(-count // run)] * run
    return (starts[:, None] + np.arange(run)).reshape(-1)[:count].astype(np.int32)


class Side:
    """What both processes have: a pool, our transports over it, NIXL bare, a group bare."""

    def __init__(
        self,
        rank: int,
        page_bytes: int,
        total: int,
        device: str,
        store: TCPStore,
        ways: Sequence[str],
    ) -> None:
        self.rank = rank
        self.num_pages = 2 * total // page_bytes
        self.pool = torch.zeros(self.num_pages, page_bytes, dtype=torch.uint8, device=device)
        if rank == SENDER:
            self.pool.random_(0, 255)
        groups = [PageGroup(page_bytes, self.num_pages)]
        self.ours: dict[str, KvTransport] = {
            way: make_transport(way, f"{way}-{rank}-{store.port}", self.pool, groups)
            for way in ways
            if "bare" not in way
        }
        self.bare = _bare_agent(f"bare-{rank}-{store.port}", self.pool)
        self.flat = torch.zeros(total, dtype=torch.uint8, device=device)
        self.group = form_group(store, rank, self.pool.device, timedelta(seconds=WAIT_S))

    def address(self) -> dict[str, Any]:
        """What the other side has to know."""
        ours = {name: transport.endpoint for name, transport in self.ours.items()}
        bare = (self.bare.get_agent_metadata(), self.pool.data_ptr(), self.pool.device.index or 0)
        return {"ours": ours, "bare": bare}

    def meet(self, other: dict[str, Any]) -> None:
        """Opens the other side."""
        for name, transport in self.ours.items():
            transport.open(other["ours"][name])

    def poll(self, ways: Collection[str]) -> None:
        """Lets what needs this side's help go on."""
        for way in self.ours.keys() & set(ways):
            self.ours[way].poll_pushes()
            self.ours[way].poll_notifications()
        if "nixl, bare" in ways:
            self.bare.get_new_notifs()


def _bare_agent(name: str, pool: torch.Tensor) -> Any:
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory(pool)
    return agent


def _table(base: int, pool: torch.Tensor, device_id: int) -> np.ndarray:
    size = pool.shape[1]
    table = np.zeros((len(pool), 3), np.uint64)
    table[:, 0] = base + np.arange(len(pool), dtype=np.uint64) * np.uint64(size)
    table[:, 1], table[:, 2] = size, device_id
    return table


def send(
    side: Side, other: dict[str, Any], pipe: Connection, settings: Mapping[str, Any]
) -> dict[str, float]:
    """Medians in GB/s by way."""
    rng = np.random.default_rng(0)
    count, run = side.num_pages // 2, settings["run"]
    source, target = (scattered(rng, side.num_pages, count, run) for _ in range(2))
    ways = {way: _way(way, side, other, pipe, source, target) for way in settings["ways"]}
    total = count * side.pool.shape[1]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(settings["repeats"]):
        for name, way in ways.items():
            pipe.send(name)
            times[name].append(way())
    return {name: total / statistics.median(t[UNCOUNTED:]) / 1e9 for name, t in times.items()}


def _way(
    name: str, side: Side, other: dict[str, Any], pipe: Connection, source: PageIds, target: PageIds
) -> Callable[[], float]:
    if name == "nixl, bare":
        return lambda: push_bare(side, other, source, target)
    if name == "nccl, bare":
        return lambda: _flat(side, pipe)
    return lambda: push_ours(side, other, name, source, target)


def push_bare(side: Side, other: dict[str, Any], source: PageIds, target: PageIds) -> float:
    """Seconds that NIXL's own wrapper takes for the pages."""
    metadata, base, device_id = other["bare"]
    memory = "VRAM" if side.pool.is_cuda else "DRAM"
    peer = side.bare.add_remote_agent(metadata)
    own_id = side.pool.device.index or 0
    own = _table(side.pool.data_ptr(), side.pool, own_id)
    local = side.bare.prep_xfer_dlist("NIXL_INIT_AGENT", own, memory)
    remote = side.bare.prep_xfer_dlist(peer, _table(base, side.pool, device_id), memory)
    begin = time.perf_counter()
    handle = side.bare.make_prepped_xfer("WRITE", local, source, remote, target, b"bare")
    side.bare.transfer(handle)
    while (state := side.bare.check_xfer_state(handle)) == "PROC":
        assert time.perf_counter() - begin < WAIT_S, "a bare transfer did not end"
    took = time.perf_counter() - begin
    assert state == "DONE", state
    side.bare.release_xfer_handle(handle)
    side.bare.release_dlist_handle(local)
    side.bare.release_dlist_handle(remote)
    return took


def push_ours(
    side: Side, other: dict[str, Any], name: str, source: PageIds, target: PageIds
) -> float:
    """Seconds that one of our transports takes for the pages."""
    transport = side.ours[name]
    begin = time.perf_counter()
    handle = transport.push(other["ours"][name].agent_name, source, target, b"ours")
    while not (ended := transport.poll_pushes()):
        assert time.perf_counter() - begin < WAIT_S, f"{name}: a push did not end"
        time.sleep(POLL_S)
    took = time.perf_counter() - begin
    assert ended == [(handle, PushState.DONE)], ended
    return took


def _flat(side: Side, pipe: Connection) -> float:
    begin = time.perf_counter()
    side.group.send([side.flat], RECEIVER, 0).wait()
    if side.flat.is_cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - begin
    assert pipe.recv() == "received"
    return took


def serve(side: Side, pipe: Connection) -> None:
    """The receiving side, until it is asked to end."""
    way = ""
    while True:
        if not pipe.poll(POLL_S):
            side.poll([way])
            continue
        way = pipe.recv()
        if not way:
            return
        if way == "nccl, bare":
            side.group.recv([side.flat], SENDER, 0).wait()
            if side.flat.is_cuda:
                torch.cuda.synchronize()
            pipe.send("received")


def prepared(
    rank: int, pipe: Connection, settings: Mapping[str, Any]
) -> tuple[Side, dict[str, Any]]:
    """This process's side, on its own GPU, and the address of the other one; they have met."""
    prepare_to_serve()  # as workers do
    if settings["device"] == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get(
            "CUDA_VISIBLE_DEVICES", f"{SENDER},{RECEIVER}"
        ).split(",")[rank]
        torch.cuda.set_device(0)
    if rank == SENDER:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipe.send(store.port)
    else:
        store = TCPStore("127.0.0.1", pipe.recv(), is_master=False)
    side = Side(
        rank, settings["page"], settings["total"], settings["device"], store, settings["ways"]
    )
    pipe.send(side.address())
    other = pipe.recv()
    side.meet(other)
    return side, other


def run(rank: int, pipe: Connection, out: Any, settings: Mapping[str, Any]) -> None:
    """One process."""
    side, other = prepared(rank, pipe, settings)
    if rank == RECEIVER:
        serve(side, pipe)
        os._exit(0)  # libraries that wait for each other's end at theirs have nothing to say
    out.put(send(side, other, pipe, settings))
    pipe.send("")
    time.sleep(0.5)
    os._exit(0)


def in_two_processes(
    target: Callable[[int, Connection, Any, Mapping[str, Any]], None],
    settings: Mapping[str, Any],
    timeout_s: float,
) -> Any:
    """What the sender's process puts out; both are fresh, and gone afterwards.

    Raises:
        queue.Empty: it took too long.
        RuntimeError: one of them failed.
    """
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    out = context.Queue()
    sides = [
        context.Process(target=target, args=(rank, pipe, out, settings))
        for rank, pipe in ((SENDER, near), (RECEIVER, far))
    ]
    for side in sides:
        side.start()
    try:
        return _answer(out, sides, timeout_s)
    finally:
        for side in sides:
            side.join(2)
            side.kill()


def _answer(out: Any, sides: Sequence[BaseProcess], timeout_s: float) -> Any:
    end = time.monotonic() + timeout_s
    while True:
        try:
            return out.get(timeout=min(1.0, max(0.0, end - time.monotonic())))
        except queue.Empty:
            if time.monotonic() >= end:
                raise
            if any(side.exitcode for side in sides):
                raise RuntimeError("one of the two processes failed; see above") from None


def measure(page_bytes: int, run_pages: int, arguments: argparse.Namespace) -> dict[str, float]:
    """GB/s by way, in two fresh processes."""
    settings = {
        "page": page_bytes, "run": run_pages, "total": arguments.total_mib << 20,
        "repeats": arguments.repeats, "device": arguments.device, "ways": arguments.ways,
    }  # fmt: skip
    timeout_s = WAIT_S + 2 * arguments.repeats * len(arguments.ways)
    found: dict[str, float] = in_two_processes(run, settings, timeout_s)
    return found


def main() -> None:
    """Prints a line for each size of pages and runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--page-mib", type=float, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--run-pages", type=int, nargs="+", default=[1])
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for page_mib in arguments.page_mib:
        for run_pages in arguments.run_pages:
            rates = measure(int(page_mib * (1 << 20)), run_pages, arguments)
            rows.append({"page_mib": page_mib, "run_pages": run_pages, "gigabytes_per_s": rates})
            shown = "  ".join(f"{name} {rate:7.1f}" for name, rate in rates.items())
            print(f"{page_mib:8g} MiB, runs of {run_pages:3d}  {shown}  GB/s", flush=True)
            about = {"total_mib": arguments.total_mib, "device": arguments.device,
                     "UCX_TLS": os.environ.get("UCX_TLS", "all"), "rows": rows}  # fmt: skip
            write_json(arguments.json, about)


if __name__ == "__main__":
    main()
