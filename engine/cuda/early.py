"""Kernels that start while the one before still runs (programmatic dependent launch).

Such a kernel executes `gdc_wait` before it reads what another has written, and before it writes
anything. Until then it may only ask for weights. Each of its programs executes it: the kernel after
it waits for this one alone, and so for all before. Other kernels start when all before have ended.

`gdc_launch_dependents` lets the next kernel start, once every program of this one has executed it
or has ended. A kernel that executes it after its `gdc_wait` promises more: the next one may read at
once what the kernels before this one have written. So does a kernel that is not started early
itself. `engine.cuda.experts.one_row` and `engine.cuda.adapters.one_row` alone need that.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def early() -> bool:
    """Whether the device can do that (Hopper and later)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
