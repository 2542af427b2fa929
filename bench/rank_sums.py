"""Sums over ranks on GPUs: what a layer pays for each of its two.

A rank of `bench.ranks --only collective --device cuda`. Each way is captured in a graph of some
calls, which is replayed; the time is the median of rank 0, by events on the device:

- with residual and norm, at the rows of a decode step of Qwen3-32B's width: in one kernel with one
  shot or two, and by NCCL with a kernel behind. `net_us` is that less the kernel that one rank runs
  in its place;
- alone, by bytes, with GB/s of what a rank has. Sums beyond the memory that ranks share go by NCCL.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from engine.cuda.kernels import add_rms_norm
from engine.cuda.ranks.collective import CudaCollective
from engine.eager.collective import GroupCollective

HIDDEN: Final = 5120
ROWS: Final = (1, 4, 16, 64, 128, 256)
BYTES: Final = (10 << 10, 64 << 10, 512 << 10, 2 << 20, 16 << 20, 64 << 20)
CALLS: Final = 16
REPLAYS: Final = 60
EPS: Final = 1e-6


def measure(store: Path, rank: int, ranks: int) -> None:
    """Prints rank 0's lines."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = CudaCollective(rank, ranks, device)
    group.join(store)

    def say(line: dict[str, Any]) -> None:
        if rank == 0:
            print(json.dumps(line), flush=True)

    stream = torch.cuda.Stream(device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        for rows in ROWS:
            _with_norm(group, rows, device, say)
        for size in BYTES:
            _alone(group, size, device, say)
    torch.cuda.synchronize(device)
    group.close()


Say = Callable[[dict[str, Any]], None]


def _with_norm(group: CudaCollective, rows: int, device: torch.device, say: Say) -> None:
    x, residual = (torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=device) for _ in range(2))
    weight = torch.rand(HIDDEN, dtype=torch.bfloat16, device=device)
    alone_us = _us(group, lambda: add_rms_norm(residual, x, weight, EPS), x)
    line = {"rows": rows, "bytes": x.nbytes}
    say({**line, "way": "one rank", "us": alone_us})
    for way, do in _ways(group, x, residual, weight).items():
        us = _us(group, do, x)
        say({**line, "way": way, "us": us, "net_us": us - alone_us})


def _ways(
    group: CudaCollective, x: Tensor, residual: Tensor, weight: Tensor
) -> dict[str, Callable[[], object]]:
    def by_nccl() -> None:
        add_rms_norm(residual, GroupCollective.all_reduce(group, x), weight, EPS)

    ways: dict[str, Callable[[], object]] = {"nccl": by_nccl}
    if (shared := group.shared) is not None and shared.fits(x):
        for name, two in (("one shot", False), ("two shots", True)):
            ways[name] = lambda two=two: shared.add_rms_norm(  # type: ignore[misc]
                residual, x, weight, EPS, two_shots=two
            )
    return ways


def _alone(group: CudaCollective, size: int, device: torch.device, say: Say) -> None:
    x = torch.randn(size // 2 // HIDDEN or 1, HIDDEN, device=device).mul_(1e-6).bfloat16()
    ways: dict[str, Callable[[], object]] = {"nccl": lambda: GroupCollective.all_reduce(group, x)}
    if (shared := group.shared) is not None and shared.fits(x):
        ways["one shot"] = lambda: shared.all_reduce(x, two_shots=False)
        ways["two shots"] = lambda: shared.all_reduce(x, two_shots=True)
    for way, do in ways.items():
        us = _us(group, do, x)
        say(
            {
                "rows": len(x),
                "bytes": x.nbytes,
                "way": way,
                "us": us,
                "gb_per_s": x.nbytes / us / 1e3,
            }
        )


def _us(group: CudaCollective, do: Callable[[], object], x: Tensor) -> float:
    """The median of a call in a graph, microseconds. All ranks begin together."""
    fresh, stream = x.clone(), torch.cuda.current_stream()
    do()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(CALLS):
        do()
    graph.capture_end()
    times: list[float] = []
    for _ in range(REPLAYS):
        x.copy_(fresh)
        group.barrier()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(stream)
        graph.replay()
        ended.record(stream)
        stream.synchronize()
        times.append(1e3 * began.elapsed_time(ended) / CALLS)
    return statistics.median(times)
