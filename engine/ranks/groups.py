"""The group of a worker's ranks, by the device that they run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from engine.eager.collective import GlooCollective, GroupCollective
from engine.eager.meeting import Meeting
from engine.eager.stages import GlooStages
from engine.step.collective import Alone
from engine.step.grid import Grid
from engine.step.stages import OneStage, Stages

if TYPE_CHECKING:
    from engine.cuda.ranks.stages import NcclStages

Meetings = Callable[[str, list[int]], Meeting]
"""The meeting of a name, and of these ranks."""


class RankGroup:
    """What a rank does with others: with those of its stage, and with the stages beside its own."""

    def __init__(self, device: str, rank: int, grid: Grid, local: int) -> None:
        """Not joined yet. `device`: the worker's. `local`: the rank's place among those of its
        host."""
        own = device_of(device, local)
        self._grid = grid
        self._stage, self._within = grid.stage_of(rank), grid.within(rank)
        self._beside = _collective_on(own, self._within, grid.tp) if grid.tp > 1 else None
        self._stages = None
        if grid.stages > 1:
            apart = torch.device(device).index is None
            self._stages = _stages_on(own, self._stage, grid.stages, apart=apart)

    @property
    def collective(self) -> GroupCollective | Alone:
        """The ranks of its stage."""
        return self._beside or Alone()

    @property
    def stages(self) -> Stages:
        """The stages beside its own."""
        return self._stages or OneStage()

    def join(self, meetings: Meetings) -> None:
        """Meets the other ranks. Blocks until all have come."""
        ranks = range(self._grid.size)
        if self._beside is not None:
            own = [rank for rank in ranks if self._grid.stage_of(rank) == self._stage]
            self._beside.join(meetings(f"stage-{self._stage}", own))
        if self._stages is not None:
            own = [rank for rank in ranks if self._grid.within(rank) == self._within]
            self._stages.join(meetings(f"column-{self._within}", own))

    def let_go(self) -> None:
        """Ends every wait of this rank for another one, for good: the ranks are lost."""
        for own in (self._stages, self._beside):
            if own is not None:
                own.let_go()

    def close(self) -> None:
        """No rank will do anything together any more."""
        for own in (self._stages, self._beside):
            if own is not None:
                own.close()


def device_of(device: str, rank: int) -> torch.device:
    """A rank's device, where the worker has this one: a GPU each, in the order of the ranks of a
    host, of which this is one. A GPU that is named is that of all."""
    own = torch.device(device)
    return own if own.type == "cpu" or own.index is not None else torch.device(own.type, rank)


def _collective_on(device: torch.device, rank: int, size: int) -> GroupCollective:
    """What a rank on this device does with the others of its stage. Not joined yet."""
    if device.type == "cpu":
        return GlooCollective(rank, size)
    from engine.cuda.ranks.collective import CudaCollective

    return CudaCollective(rank, size, device)


def _stages_on(
    device: torch.device, stage: int, count: int, *, apart: bool
) -> GlooStages | NcclStages:
    """How hidden states go from a stage on this device to others. `apart`: each rank has a GPU of
    its own."""
    if device.type == "cpu":
        return GlooStages(stage, count)
    from engine.cuda.ranks.stages import HostStages, NcclStages

    if apart:
        return NcclStages(stage, count, device)
    return HostStages(stage, count)
