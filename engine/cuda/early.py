"""Kernels that start while the one before still runs (programmatic dependent launch).

Such a kernel executes `gdc_wait` before it reads what another has written, and before it writes
anything. Until then it may only ask for weights. Each of its programs executes it: the kernel after
it waits for this one alone, and so for all before.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def early() -> bool:
    """Whether the device can do that (Hopper and later)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
