"""An engine's view of its expert group: no ranks of its own, and others that must live."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.expert_groups.executor import GroupExecutor
from engine.expert_groups.gloo import GlooDispatch
from engine.expert_groups.leader import GroupError, Leader
from engine.expert_groups.lines import Message
from engine.expert_groups.member import Member
from engine.ranks.keeper import RankError
from engine.ranks.ranks import NoRanks
from engine.step.collective import CollectiveError
from engine.step.dispatch import place_of
from engine.step.executor import Executor


class GroupedRanks(NoRanks):
    """The one rank of a worker in an expert group. Rank 0 of the group leads it. Where a worker of
    the group is gone, the group is lost, and so is this engine."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts nothing yet."""
        super().__init__()
        self._place = place_of(config.expert_group)
        dispatch = GlooDispatch(self._place.rank, self._place.ranks)
        self.dispatch = self._gloo = dispatch
        hello = {"rank": self._place.rank} | _alike(config, self._place.ranks)
        self._member = Member(hello, self._place.folder, dispatch.run_without_tokens)
        dispatch.member, self._member.let_go = self._member, dispatch.let_go
        self._leader: Leader | None = None
        self._is_started = False

    @property
    def lost(self) -> str:
        """See `Ranks`."""
        return self._member.lost

    def start(self) -> None:
        """See `Ranks`. Waits until the others have come: nobody reads weights for a group that does
        not form."""
        try:
            if self._place.rank == 0:
                self._leader = Leader(self._place.folder, self._place.ranks)
            self._is_started = True
            self._member.start()
            self._store = self._member.meet()
        except (GroupError, CollectiveError, OSError) as error:
            raise RankError(str(error)) from error

    def check(self) -> None:
        """See `Ranks`."""
        if self.lost:
            raise RankError(self.lost)

    def agree(self, revision: str, num_pages: int) -> int:
        """See `Ranks`. Each worker has a pool of its own size."""
        try:
            self._member.loaded(revision)
            self._gloo.join(self._store)
        except CollectiveError as error:
            raise RankError(str(error)) from error
        return num_pages

    def wait_until_ready(self) -> None:
        """See `Ranks`. Until then a step of one would run experts that another has not finished."""
        try:
            self._member.finished()
        except CollectiveError as error:
            raise RankError(str(error)) from error

    def executor(self, own: Executor) -> Executor:
        """See `Ranks`."""
        return GroupExecutor(own, self._gloo.failed)

    def call_when_lost(self, on_lost: Callable[[str], None]) -> None:
        """See `Ranks`."""
        self._member.on_lost = on_lost
        if self.lost:
            on_lost(self.lost)

    def close(self) -> None:
        """See `Ranks`."""
        if self._is_started:
            self._member.close()
        if self._leader is not None:
            self._leader.close()
            self._leader = None


def _alike(config: EngineConfig, ranks: int) -> Message:
    """What all workers of a group must have alike."""
    described = Path(config.model) / "config.json"
    content = described.read_bytes() if described.is_file() else config.model.encode()
    model = hashlib.sha256(content).hexdigest()[:16]
    return {
        "ranks": ranks,
        "model": model,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "load_format": config.load_format,
    }
