"""Whether the workers of `baton up` fit into memory together, before any of them starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine import memory
from engine.checkpoints import weights_of
from worker.settings import WorkerSettings


def check_room(settings: WorkerSettings, workers_on: Mapping[str, int]) -> None:
    """Compares what all workers of each device need with its free memory.

    Workers compare again for themselves, by the model's config. This counts the weights in the
    files. Where there are none, or nobody knows a GPU's memory, it leaves that to the workers.

    Args:
        settings: those of every worker; `model` is its folder or GGUF file.
        workers_on: number of workers on each GPU; on "" they run on the CPU.

    Raises:
        NoRoomError: they do not fit on one of them.
    """
    weights = weights_of(Path(settings.model))
    if weights is None or settings.debug.load_format == "dummy":
        return
    for gpu, workers in workers_on.items():
        need = memory.need_of(
            weights,
            dtype=settings.dtype,
            kv_memory_bytes=settings.kv_memory_bytes,
            num_pages=settings.debug.num_pages,
            on_gpu=bool(gpu),
            quantization=settings.quantization,
            workers=workers,
        )
        free = memory.free_gpu_bytes(gpu) if gpu else memory.available_bytes()
        if free is not None:
            memory.check(need, free, f"GPU {gpu}" if gpu else "this machine")
