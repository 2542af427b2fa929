"""A rank on a GPU: sums, gathers and barriers with the other ranks, against float64.

python ranks_process.py STORE RANK SIZE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from ranks_kit import EPS, parts_of
from torch import Tensor

from engine.cuda.kernels import add_rms_norm
from engine.cuda.ranks.collective import CudaCollective
from engine.eager.meeting import meeting_in

SIZE = 5120
ROWS = (1, 2, 3, 7, 8, 64, 65, 256, 1000, 3000, 8192)
"""The last is larger than the memory that ranks share."""
SLEEP_CYCLES = 10_000_000
MOST_GHZ = 2.5
"""Clocks of GPUs are slower, so that a sleep takes longer."""
ROUNDS = 10


def check(group: CudaCollective, rows: int, device: torch.device) -> None:
    parts = parts_of(group.size, rows, SIZE, torch.bfloat16, device, rows)
    own = parts[group.rank]
    total = torch.stack([part.double() for part in parts]).sum(0)
    got = group.all_reduce(own.clone())
    error = (got.double() - total).norm() / total.norm()
    assert error < 3e-3, (rows, float(error))
    residual = parts_of(1, rows, SIZE, torch.bfloat16, device, 7)[0]
    weight = parts_of(1, 1, SIZE, torch.bfloat16, device, 8)[0][0]
    ours, theirs = residual.clone(), residual.clone()
    normed = group.add_rms_norm(ours, own.clone(), weight, EPS)
    want = add_rms_norm(theirs, got.clone(), weight, EPS)
    assert torch.equal(ours, theirs), rows
    torch.testing.assert_close(normed, want, rtol=0.02, atol=1e-3)
    same(group, got)
    same(group, normed)


def same(group: CudaCollective, x: Tensor) -> None:
    """All ranks have the same bits."""
    digest = x.view(torch.int16).long().sum().view(1, 1).int()
    told = group.gather_on_all(digest)
    assert (told == told[0]).all(), told


def check_graph(group: CudaCollective, device: torch.device) -> None:
    """An odd number of sums, replayed many times, with ranks that are late in turns."""
    stream = torch.cuda.Stream(device)
    x = torch.empty(64, SIZE, dtype=torch.bfloat16, device=device)
    few = torch.empty(2, SIZE, dtype=torch.bfloat16, device=device)
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()

        def sums() -> None:
            group.all_reduce(x)
            group.all_reduce(few)
            group.all_reduce(x)

        x.fill_(1)
        few.fill_(1)
        sums()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        sums()
        graph.capture_end()
        for turn in range(200):
            x.fill_(turn % 7)
            few.fill_(turn % 5)
            if turn % group.size == group.rank:
                torch.cuda._sleep(200_000)
            graph.replay()
            assert_all(x, turn % 7 * group.size**2)
            assert_all(few, turn % 5 * group.size)
            group.barrier()
        stream.synchronize()
    del graph


def check_waits(group: CudaCollective, device: torch.device) -> None:
    """The last rank is late for a sum of a graph. The others wait, and rank 0 sees it."""
    x = torch.ones(8, SIZE, dtype=torch.bfloat16, device=device)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        if group.rank == group.size - 1:
            torch.cuda._sleep(SLEEP_CYCLES)
        group.all_reduce(x)
        graph.capture_end()
        group.barrier()
        before = group.waits()
        for _ in range(ROUNDS):
            graph.replay()
        group.barrier()
        after = group.waits()
        stream.synchronize()
    del graph
    if group.rank:
        assert before is None, "rank 0 tells it"
        return
    assert before is not None
    assert after is not None
    *others, last = (after - before).tolist()
    assert min(others) - last > 0.8 * ROUNDS * SLEEP_CYCLES / MOST_GHZ, (others, last)


def assert_all(x: Tensor, value: int) -> None:
    assert bool((x == value).all()), (value, x.unique().tolist())


def main(store: str, rank: int, size: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = CudaCollective(rank, size, device)
    environment = dict(os.environ)
    group.join(meeting_in(Path(store), size))
    assert dict(os.environ) == environment, "it is the user's"
    for _ in range(3):
        for rows in ROWS:
            check(group, rows, device)
    check_graph(group, device)
    check_waits(group, device)
    logits = torch.full((3, 5 - rank), float(rank), dtype=torch.bfloat16, device=device)
    whole = group.gather(logits, 5 * size - (size - 1) if size == 2 else 5 * size)
    if rank == 0 and size == 2:
        assert whole.tolist() == [[0.0] * 5 + [1.0] * 4] * 3
    tokens = torch.arange(4, dtype=torch.int32, device=device) * (1 - min(rank, 1))
    group.broadcast(tokens)
    assert tokens.tolist() == [0, 1, 2, 3]
    torch.cuda.synchronize()
    print(group.path, flush=True)
    group.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
