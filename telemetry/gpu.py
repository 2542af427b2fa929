"""What NVML says of one GPU: nothing where there is no driver or no `pynvml`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)


class GpuLoad(NamedTuple):
    """One reading."""

    utilization: float
    """Share of the last moments in which some kernel ran, in [0, 1]: says nothing about how much
    of the GPU it used."""
    memory_used_bytes: int
    """By all processes."""
    memory_total_bytes: int
    power_watts: float


def gpu_reader(uuid: str, nvml: Any = None) -> Callable[[], GpuLoad | None]:
    """Reads the GPU of that UUID ("GPU-...") whenever it is called; None where that fails.

    Args:
        uuid: as NVML knows it: indices mean other GPUs where CUDA_VISIBLE_DEVICES is set.
        nvml: the module `pynvml`; None imports it.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception as error:  # Not installed, no driver, no such GPU: NVML has a class for each.
        logger.info("no figures of the GPU", extra={"error_type": type(error).__qualname__})
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
