"""Reads the load of one GPU from NVML. Without a driver or without `pynvml` there is none."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class GpuLoad(NamedTuple):
    """One reading."""

    utilization: float
    """Share of recent time in which some kernel ran, in [0, 1]. A kernel may use little of the
    GPU."""
    memory_used_bytes: int
    """Memory in use by all processes."""
    memory_total_bytes: int
    power_watts: float


def gpu_reader(uuid: str, nvml: Any = None) -> Callable[[], GpuLoad | None]:
    """Makes a function that reads a GPU's load; it returns None if that fails.

    Args:
        uuid: UUID of the GPU ("GPU-..."). NVML's indices ignore CUDA_VISIBLE_DEVICES.
        nvml: the module `pynvml`; None imports it.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception as error:  # NVML has many classes: not installed, no driver, no such GPU.
        details = {"error_type": type(error).__qualname__}
        logger.info("metrics of the GPU cannot be read", extra=details)
        return lambda: None
    return lambda: _read(nvml, handle)


def _read(nvml: Any, handle: Any) -> GpuLoad | None:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        return GpuLoad(
            utilization=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            memory_used_bytes=memory.used,
            memory_total_bytes=memory.total,
            power_watts=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        )
    except nvml.NVMLError:
        return None
