"""KV pages between two workers of several ranks: `python -m bench.kv_wire --ranks 2x2`.

Each rank is a process, and pushes go through the group's transport, as in a worker: rank 0 asks the
others over a socket. `--page-mib` are those of a whole page, which 8 KV heads divide: 5 are one of
Llama-70B, 16 tokens in bfloat16. GB/s count the bytes of all ranks together, as rank 0 of the
sending worker sees it from posting to the end of the last part.

Rank r of the sender is on GPU r, rank r of the receiver on the next one. So with 2x2 on two GPUs
both send to each other. With 1x2 and 2x1 one part stays on its GPU. At the end every rank of the
receiver looks at each head of each page that came, and a wrong one is an error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq

from bench.kv_pushes import POLL_S, UNCOUNTED, WAIT_S, Pipe, scattered
from kv_transfer.ranks.build import Others, Run, group_transport, serve
from kv_transfer.ranks.group import GroupTransport
from kv_transfer.ranks.plan import units_of
from kv_transfer.types import PageIds, PushState
from serving.event_loop import prepare_to_serve

KV_HEADS = 8
START_S = 90.0
SENDS, RECEIVES = "sends", "receives"


@dataclass
class Pool:
    """A rank's part of the pages; see `kv_transfer.ranks.build.Pool`."""

    data: torch.Tensor
    page_runs: tuple[Run, ...]
    drafts_digest: str = ""


def value(page: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """What every byte of a head of a sender's page is."""
    return (page * 7 + head * 31 + 1) % 251


class Rank(NamedTuple):
    """One process."""

    side: str
    number: int
    ranks: int
    """Ranks of its worker."""
    folder: str
    """Folder of the sockets of its worker's ranks."""

    @property
    def heads(self) -> torch.Tensor:
        """Pages that it holds."""
        return torch.tensor(list(units_of(self.number, self.ranks, KV_HEADS)))

    def socket(self, number: int, binds: bool) -> zmq.Socket[bytes]:
        """The one between rank 0 and rank `number`."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        socket = context.socket(zmq.PAIR)
        at = f"ipc://{self.folder}/{self.side}-{number}"
        if binds:
            socket.bind(at)
        else:
            socket.connect(at)
        return socket


def device_of(rank: Rank, device: str) -> torch.device:
    """The GPU of a rank. Each worker sees all GPUs, its own rank's first, as workers do."""
    if device == "cpu":
        return torch.device("cpu")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    shift = 0 if rank.side == SENDS else 1
    turned = [gpus[(index + shift) % len(gpus)] for index in range(len(gpus))]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(turned)
    own = rank.number % len(gpus)
    torch.cuda.set_device(own)
    return torch.device("cuda", own)


def pool_of(rank: Rank, settings: Mapping[str, Any]) -> Pool:
    """Zeros at the receiver; at the sender each head of each page has a value of its own."""
    device = device_of(rank, settings["device"])
    num_pages = 2 * settings["total"] // settings["page"]
    head_bytes = settings["page"] // KV_HEADS
    heads = rank.heads.to(device)
    data = torch.zeros(num_pages, len(heads) * head_bytes, dtype=torch.uint8, device=device)
    if rank.side == SENDS:
        pages = torch.arange(num_pages, device=device)[:, None]
        values = value(pages, heads[None, :]).to(torch.uint8)
        data.view(num_pages, len(heads), head_bytes).copy_(values[:, :, None])
    if data.is_cuda:
        torch.cuda.synchronize()
    return Pool(data, ((data.shape[1], num_pages, 0, 0, 0, (), ()),))


def pages_of(settings: Mapping[str, Any], run: int) -> tuple[PageIds, PageIds]:
    """Source and target of every push in runs of so many."""
    rng = np.random.default_rng(run)
    num_pages = 2 * settings["total"] // settings["page"]
    first, second = (scattered(rng, num_pages, num_pages // 2, run) for _ in range(2))
    return first, second


def wrong_heads(pool: Pool, rank: Rank, settings: Mapping[str, Any]) -> int:
    """Heads of pages that are not what the last push should have left."""
    sources, targets = pages_of(settings, settings["runs"][-1])
    device = pool.data.device
    heads, wrong = rank.heads.to(device), 0
    for at in range(0, len(sources), 64):
        source = torch.from_numpy(sources[at : at + 64]).to(device).long()
        target = torch.from_numpy(targets[at : at + 64]).to(device).long()
        came = pool.data[target].view(len(target), len(heads), -1)
        due = value(source[:, None], heads[None, :]).to(torch.uint8)
        wrong += int((came != due[:, :, None]).any(-1).sum())
    return wrong


def run(rank: Rank, pipe: Pipe, settings: Mapping[str, Any]) -> None:
    """One process."""
    prepare_to_serve()  # as workers do
    pool = pool_of(rank, settings)
    if rank.number:
        socket = rank.socket(rank.number, binds=False)
        threading.Thread(target=serve, args=(socket, rank.number, pool), daemon=True).start()
    else:
        sockets = [rank.socket(other, binds=True) for other in range(1, rank.ranks)]
        name = f"{rank.side}-{os.getpid()}"
        transport = group_transport("nixl", name, pool, (KV_HEADS,), Others(sockets, lambda: ""))
        pipe.send(transport.endpoint)
        peer = pipe.recv()
        transport.open(peer)
        pipe.send("open")
        pipe.recv()
        if rank.side == SENDS:
            pipe.send(send(transport, peer.agent_name, settings))
        else:
            receive(transport, pipe)
    pipe.recv()
    pipe.send(wrong_heads(pool, rank, settings) if rank.side == RECEIVES else 0)
    pipe.recv()  # Nobody ends before all have looked.
    os._exit(0)  # as in `bench.kv_wire`


def send(transport: GroupTransport, peer: str, settings: Mapping[str, Any]) -> dict[int, float]:
    """Medians in GB/s by pages of a run."""
    found = {}
    for length in settings["runs"]:
        source, target = pages_of(settings, length)
        times = []
        for _ in range(settings["repeats"]):
            begin = time.perf_counter()
            handle = transport.push(peer, source, target, b"pages")
            while not (ended := transport.poll_pushes()):
                assert time.perf_counter() - begin < WAIT_S, "a push did not end"
                time.sleep(POLL_S)
            times.append(time.perf_counter() - begin)
            assert ended == [(handle, PushState.DONE)], ended
        size = len(source) * settings["page"]
        found[length] = size / statistics.median(times[UNCOUNTED:]) / 1e9
    return found


def receive(transport: GroupTransport, pipe: Pipe) -> None:
    """Hears notifications until the sender is through."""
    while not pipe.poll(POLL_S):
        transport.poll_notifications()
        transport.poll_pushes()
    pipe.recv()
    pipe.send("heard")


def measure(
    ranks: tuple[int, int], page_bytes: int, options: argparse.Namespace
) -> dict[int, float]:
    """GB/s by pages of a run, from fresh processes.

    Raises:
        RuntimeError: a process failed or took too long, or bytes came wrong.
    """
    settings = {
        "page": page_bytes, "total": options.total_mib << 20, "runs": options.run_pages,
        "repeats": options.repeats, "device": options.device,
    }  # fmt: skip
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], {}
    with tempfile.TemporaryDirectory(prefix="baton-wire-") as folder:
        for side, count in zip((SENDS, RECEIVES), ranks, strict=True):
            for number in range(count):
                near, far = context.Pipe()
                rank = Rank(side, number, count, folder)
                pipes[side, number] = near
                processes.append(context.Process(target=run, args=(rank, far, settings)))
        for process in processes:
            process.start()
        try:
            return _led(pipes, processes)
        finally:
            for process in processes:
                process.join(3)
                process.kill()


def _led(
    pipes: Mapping[tuple[str, int], Pipe], processes: Sequence[BaseProcess]
) -> dict[int, float]:
    said = partial(_said, processes)
    sender, receiver = pipes[SENDS, 0], pipes[RECEIVES, 0]
    endpoints = [said(pipe, START_S) for pipe in (sender, receiver)]
    for pipe, endpoint in zip((sender, receiver), reversed(endpoints), strict=True):
        pipe.send(endpoint)
    for pipe in (sender, receiver):
        said(pipe, START_S)
    for pipe in (receiver, sender):
        pipe.send("go")
    rates: dict[int, float] = said(sender, 4 * WAIT_S)
    receiver.send("through")
    said(receiver, WAIT_S)
    for pipe in pipes.values():
        pipe.send("end")
    wrong = {rank: said(pipe, WAIT_S) for rank, pipe in pipes.items()}
    for pipe in pipes.values():
        pipe.send("bye")
    if any(wrong.values()):
        raise RuntimeError(f"heads that came wrong: {wrong}")
    return rates


def _said(processes: Sequence[BaseProcess], pipe: Pipe, timeout_s: float) -> Any:
    """What a process says."""
    end_s = time.monotonic() + timeout_s
    while not pipe.poll(0.5):
        if any(process.exitcode for process in processes):
            raise RuntimeError("a rank failed; see above")
        if time.monotonic() > end_s:
            raise RuntimeError(f"a rank said nothing for {timeout_s:.0f} s; see above")
    return pipe.recv()


def main(options: argparse.Namespace) -> None:
    """Prints a line for each size of pages and runs."""
    rows = []
    for ranks in options.ranks:
        first, second = map(int, ranks.split("x"))
        for page_mib in options.page_mib:
            rates = measure((first, second), int(page_mib * (1 << 20)), options)
            for length, rate in rates.items():
                rows.append({"ranks": ranks, "page_mib": page_mib, "run_pages": length,
                             "gigabytes_per_s": round(rate, 2)})  # fmt: skip
                print(
                    f"{ranks}  {page_mib:g} MiB, runs of {length:3d}  {rate:7.1f} GB/s", flush=True
                )
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
