"""KV pages between two processes, a GPU each: the transports beside the libraries under them.

python -m bench.kv_wire [--page-mib 2 4 8 16] [--total-mib 1024] [--repeats 8] [--device cuda]

Scattered pages, all of `total-mib` in one push, GB/s as the sender sees it from posting to the end:

    nixl, bare      the library's own calls: a prepared list, one transfer, polled without a pause
    nixl            our transport, polled every 100 us
    nccl            our transport, polled every 100 us: pages gathered, sent, scattered
    nccl, bare      one contiguous tensor of that size through send and recv

The ways take turns in every repeat; the first two repeats do not count. On a CPU the bytes go
through shared memory, and Gloo stands for NCCL.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore

from kv_transfer.factory import make_transport
from kv_transfer.lanes import RECEIVER, SENDER, form_group
from kv_transfer.types import KvTransport, PageIds, PushState

POLL_S = 1e-4
UNCOUNTED = 2
WAIT_S = 60.0
OURS = ("nixl", "nccl")


class Side:
    """What both processes have: a pool, our transports over it, NIXL bare, a group bare."""

    def __init__(self, rank: int, page_bytes: int, total: int, device: str, port: int) -> None:
        self.rank = rank
        self.num_pages = 2 * total // page_bytes
        self.pool = torch.zeros(self.num_pages, page_bytes, dtype=torch.uint8, device=device)
        if rank == SENDER:
            self.pool.random_(0, 255)
        self.ours: dict[str, KvTransport] = {
            name: make_transport(
                name, f"{name}-{rank}-{port}", self.pool, page_bytes, len(self.pool)
            )
            for name in OURS
        }
        self.bare = _bare_agent(f"bare-{rank}-{port}", self.pool)
        self.flat = torch.zeros(total, dtype=torch.uint8, device=device)
        store = TCPStore("127.0.0.1", port, is_master=rank == SENDER, wait_for_workers=False)
        self.group = form_group(store, rank, self.pool.device)

    def address(self) -> dict[str, Any]:
        """What the other side has to know."""
        ours = {name: transport.endpoint for name, transport in self.ours.items()}
        bare = (self.bare.get_agent_metadata(), self.pool.data_ptr(), self.pool.device.index or 0)
        return {"ours": ours, "bare": bare}

    def meet(self, other: dict[str, Any]) -> None:
        """Opens the other side."""
        for name, transport in self.ours.items():
            transport.open(other["ours"][name])

    def poll(self) -> None:
        """Lets what needs this side's help go on."""
        for transport in self.ours.values():
            transport.poll_pushes()
            transport.poll_notifications()
        self.bare.get_new_notifs()


def _bare_agent(name: str, pool: torch.Tensor) -> Any:
    from nixl_cu13._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    agent.register_memory(pool)
    return agent


def _pages(base: int, pool: torch.Tensor, device_id: int) -> np.ndarray:
    size = pool.shape[1]
    table = np.zeros((len(pool), 3), np.uint64)
    table[:, 0] = base + np.arange(len(pool), dtype=np.uint64) * np.uint64(size)
    table[:, 1], table[:, 2] = size, device_id
    return table


def send(side: Side, other: dict[str, Any], pipe: Connection, repeats: int) -> dict[str, float]:
    """Medians in GB/s by way."""
    rng = np.random.default_rng(0)
    count = side.num_pages // 2
    source, target = (rng.permutation(side.num_pages)[:count].astype(np.int32) for _ in range(2))
    ways: dict[str, Callable[[], float]] = {
        "nixl, bare": lambda: _bare(side, other, source, target),
        "nixl": lambda: _ours(side, other, "nixl", source, target),
        "nccl": lambda: _ours(side, other, "nccl", source, target),
        "nccl, bare": lambda: _flat(side, pipe),
    }
    total = count * side.pool.shape[1]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            times[name].append(way())
    return {name: total / statistics.median(t[UNCOUNTED:]) / 1e9 for name, t in times.items()}


def _bare(side: Side, other: dict[str, Any], source: PageIds, target: PageIds) -> float:
    metadata, base, device_id = other["bare"]
    memory = "VRAM" if side.pool.is_cuda else "DRAM"
    peer = side.bare.add_remote_agent(metadata)
    own_id = side.pool.device.index or 0
    own = _pages(side.pool.data_ptr(), side.pool, own_id)
    local = side.bare.prep_xfer_dlist("NIXL_INIT_AGENT", own, memory)
    remote = side.bare.prep_xfer_dlist(peer, _pages(base, side.pool, device_id), memory)
    begin = time.perf_counter()
    handle = side.bare.make_prepped_xfer("WRITE", local, source, remote, target, b"bare")
    side.bare.transfer(handle)
    while (state := side.bare.check_xfer_state(handle)) == "PROC":
        pass
    took = time.perf_counter() - begin
    assert state == "DONE", state
    side.bare.release_xfer_handle(handle)
    side.bare.release_dlist_handle(local)
    side.bare.release_dlist_handle(remote)
    return took


def _ours(side: Side, other: dict[str, Any], name: str, source: PageIds, target: PageIds) -> float:
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
    pipe.send("receive")
    begin = time.perf_counter()
    side.group.send([side.flat], RECEIVER, 0).wait()
    if side.flat.is_cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - begin
    assert pipe.recv() == "received"
    return took


def serve(side: Side, pipe: Connection) -> None:
    """The receiving side, until it is told to end."""
    while True:
        if not pipe.poll(POLL_S):
            side.poll()
        elif pipe.recv() == "receive":
            side.group.recv([side.flat], SENDER, 0).wait()
            if side.flat.is_cuda:
                torch.cuda.synchronize()
            pipe.send("received")
        else:
            return


def run(rank: int, pipe: Connection, out: Any, settings: dict[str, Any]) -> None:
    """One process."""
    if settings["device"] == "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
        torch.cuda.set_device(0)
    side = Side(rank, settings["page"], settings["total"], settings["device"], settings["port"])
    pipe.send(side.address())
    other = pipe.recv()
    side.meet(other)
    if rank == RECEIVER:
        serve(side, pipe)
        os._exit(0)  # libraries that wait for each other's end at theirs have nothing to say
    out.put(send(side, other, pipe, settings["repeats"]))
    pipe.send("end")
    time.sleep(0.5)
    os._exit(0)


def measure(page_bytes: int, arguments: argparse.Namespace) -> dict[str, float]:
    """GB/s by way, in two fresh processes."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    out = context.Queue()
    probe = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(9))
    settings = {
        "page": page_bytes, "total": arguments.total_mib << 20, "repeats": arguments.repeats,
        "device": arguments.device, "port": probe.port,
    }  # fmt: skip
    del probe
    sides = [
        context.Process(target=run, args=(rank, pipe, out, settings))
        for rank, pipe in ((SENDER, near), (RECEIVER, far))
    ]
    for side in sides:
        side.start()
    try:
        found: dict[str, float] = out.get(timeout=WAIT_S + 5 * arguments.repeats)
    finally:
        for side in sides:
            side.join(10)
            side.kill()
    return found


def main() -> None:
    """Prints a line per page size, and the same as JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page-mib", type=float, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--total-mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    rows = {}
    for page_mib in arguments.page_mib:
        rows[page_mib] = measure(int(page_mib * (1 << 20)), arguments)
        rates = "  ".join(f"{name} {rate:7.1f}" for name, rate in rows[page_mib].items())
        print(f"{page_mib:6g} MiB  {rates}  GB/s", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
