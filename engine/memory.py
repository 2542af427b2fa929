"""Whether workers fit into the memory of a host or a GPU, before their weights are read."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from engine.checkpoints import Weights
from engine.config import Dtype

GIB: Final = 1 << 30
CPU_POOL_BYTES: Final = GIB
"""KV pool of a worker on a CPU, unless its size is set."""
BESIDE_BYTES: Final = GIB // 2
"""What a worker needs beside weights and pool: code, buffers, the CUDA context."""
WEIGHT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of one weight, by dtype."""
QUANTIZED_BYTES: Final = {"fp8": 1}
"""Bytes of one weight that a GPU rounds while loading, by `quantization`."""
_LEAST_POOL_BYTES: Final = GIB // 10
"""A smaller pool is not suggested."""
_CGROUP: Final = Path("/sys/fs/cgroup")
_NVIDIA_SMI_S: Final = 10.0
"""It answers within a second, or hangs with its driver."""


class NoRoomError(Exception):
    """Workers do not fit; the message says what would."""


@dataclass(frozen=True, slots=True)
class Need:
    """What each of some workers with the same model needs, bytes."""

    weights: Weights
    weight_bytes: int
    """Bytes of one weight."""
    pool_bytes: int
    """0 if the pool takes what is left."""
    on_gpu: bool
    quantization: str = ""
    workers: int = 1

    @property
    def model_bytes(self) -> int:
        """All weights. On a CPU quantised weights are widened, and a tied embedding of float32 is
        kept twice: once packed."""
        weights = self.weights
        if not self.on_gpu:
            twice = weights.tied if self.weight_bytes == 4 else 0
            return (weights.count + weights.packed_count + twice) * self.weight_bytes
        inside = weights.count - weights.outside
        inside_bytes = min(self.weight_bytes, QUANTIZED_BYTES.get(self.quantization, 4)) * inside
        return weights.outside * self.weight_bytes + inside_bytes + weights.packed_bytes

    @property
    def each_bytes(self) -> int:
        """What one worker needs."""
        return self.model_bytes + self.pool_bytes + BESIDE_BYTES

    @property
    def all_bytes(self) -> int:
        """What all need."""
        return self.workers * self.each_bytes


def dtype_on(dtype: Dtype, *, on_gpu: bool) -> Dtype:
    """The dtype that a setting asks for on a device."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if on_gpu else "float32"


def need_of(
    weights: Weights,
    *,
    dtype: Dtype,
    kv_memory_bytes: int,
    num_pages: int,
    on_gpu: bool,
    quantization: str = "",
    workers: int = 1,
) -> Need:
    """What workers with these settings need. The other arguments are as in `EngineConfig`."""
    is_left_open = on_gpu or num_pages
    return Need(
        weights=weights,
        weight_bytes=WEIGHT_BYTES[dtype_on(dtype, on_gpu=on_gpu)],
        pool_bytes=kv_memory_bytes or (0 if is_left_open else CPU_POOL_BYTES),
        on_gpu=on_gpu,
        quantization=quantization,
        workers=workers,
    )


def check(need: Need, free_bytes: int, where: str) -> None:
    """Compares what workers need with what is free.

    Args:
        need: of all workers there.
        free_bytes: memory there.
        where: `this machine` or a GPU's name.

    Raises:
        NoRoomError: it is too little.
    """
    if need.all_bytes <= free_bytes:
        return
    of = f"{need.workers} workers, each with" if need.workers > 1 else "one worker with"
    raise NoRoomError(
        f"the model needs {_gib(need.all_bytes)} GiB, {_gib(free_bytes)} are free on {where} "
        f"({of} {_gib(need.model_bytes)} of weights and {_gib(need.pool_bytes)} of KV pool): "
        + _advice(need, free_bytes)
    )


def _advice(need: Need, free_bytes: int) -> str:
    """What would fit."""
    fits = []
    small = replace(need, weight_bytes=2)
    if small.weight_bytes < need.weight_bytes and small.all_bytes <= free_bytes:
        fits.append(f"dtype bfloat16 (BATON_DTYPE) needs {_gib(small.all_bytes)}")
    fp8 = replace(small, quantization="fp8")
    if _is_float(need) and small.all_bytes > free_bytes and fp8.all_bytes <= free_bytes:
        fits.append(f"quantization fp8 (BATON_QUANTIZATION) needs {_gib(fp8.all_bytes)}")
    pool = free_bytes // need.workers - (need.each_bytes - need.pool_bytes)
    if _LEAST_POOL_BYTES <= pool < need.pool_bytes:
        tenths = pool * 10 // GIB / 10
        fits.append(f"kv_memory_gib {tenths:g} fits and holds fewer tokens")
    if need.workers > (room := free_bytes // need.each_bytes) > 0:
        fits.append(f"there is room for {room} such worker{'s' if room > 1 else ''}")
    if need.on_gpu and need.workers > 1:
        fits.append("give each worker a GPU")
    return "; ".join(fits) or "take a smaller model, or more memory"


def _is_float(need: Need) -> bool:
    """Whether a GPU could round the weights while they are loaded."""
    few = need.weights.packed_bytes * 10 < need.weights.count
    return need.on_gpu and few and not need.quantization


def _gib(count: int) -> str:
    return f"{count / GIB:.1f}"


def available_bytes() -> int:
    """Memory of this host that is available without swapping, or what a container's limit leaves of
    it. The page cache counts as free."""
    return available_and_all_bytes()[0]


def available_and_all_bytes() -> tuple[int, int]:
    """As `available_bytes`; and what there would be if nobody used any."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    available, total = (
        os.sysconf(name) * page_bytes for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
    )
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _limit()
    return (available, total) if limit is None else (min(available, limit[0]), min(total, limit[1]))


def _limit() -> tuple[int, int] | None:
    """What the limit of the process's control group leaves (cgroup v2), and the limit; None without
    one."""
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        if most == "max":
            return None
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(most) - used + int(stat.get("inactive_file", 0)), int(most)


def free_gpu_bytes(gpu: str) -> int | None:
    """Free memory of a GPU, by its name in `CUDA_VISIBLE_DEVICES`; None if nobody can tell."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        printed = subprocess.run(
            command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True
        )
        return int(printed.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def gpus_apart(count: int) -> list[str]:
    """Pairs of the first `count` GPUs, as `0-1`, of which the first cannot read the other's
    memory."""
    import torch

    return [
        f"{one}-{other}"
        for one in range(count)
        for other in range(count)
        if one != other and not torch.cuda.can_device_access_peer(one, other)
    ]
