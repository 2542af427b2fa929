"""The group of a worker's ranks, by the device that they run on."""

from __future__ import annotations

import torch

from engine.eager.collective import GlooCollective, GroupCollective


def device_of(device: str, rank: int) -> torch.device:
    """A rank's device, where the worker has this one: a GPU each, in the order of ranks."""
    return torch.device(device) if device == "cpu" else torch.device(device, rank)


def group_on(device: torch.device, rank: int, size: int) -> GroupCollective:
    """What a rank on this device does with the others. Not joined yet."""
    if device.type == "cpu":
        return GlooCollective(rank, size)
    from engine.cuda.ranks.collective import CudaCollective

    return CudaCollective(rank, size, device)
