"""An engine's view of its expert group: no ranks of its own, and others that must live."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from engine.config import EngineConfig
from engine.expert_groups.executor import GroupExecutor
from engine.expert_groups.gloo import GlooDispatch
from engine.expert_groups.leader import GroupError, Leader
from engine.expert_groups.lines import Message
from engine.expert_groups.member import Member
from engine.model.experts.counting import PairCount
from engine.ranks.keeper import RankError
from engine.ranks.ranks import NoRanks
from engine.ranks.stats import RankLoad
from engine.step.collective import CollectiveError
from engine.step.dispatch import GroupPlace, place_of
from engine.step.executor import Executor

if TYPE_CHECKING:
    from engine.cuda.groups.dispatch import CudaDispatch

_LOOK_S: Final = 0.05
"""While it meets the other workers, this one looks this often whether they live, seconds."""
_OF_GRAPHS: Final = (
    "decodes",
    "max_sequences",
    "max_step_tokens",
    "max_adapters",
    "cuda_graphs",
)
"""What the sizes of graphs follow from."""


class GroupedRanks(NoRanks):
    """The one rank of a worker in an expert group. Rank 0 of the group leads it. Where a worker of
    the group is gone, the group is lost, and so is this engine."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts nothing yet."""
        super().__init__()
        self._place = place_of(config.expert_group)
        dispatch = _dispatch_on(torch.device(config.device), self._place)
        self.dispatch = self._moves = dispatch
        hello = {"rank": self._place.rank} | _alike(config, self._place.ranks)
        self._member = Member(hello, self._place.folder, dispatch.run_without_tokens)
        dispatch.member, self._member.let_go = self._member, dispatch.let_go
        self._leader: Leader | None = None
        self._is_started = False
        self._computed = deque([0], maxlen=1)
        """Pairs that it has computed so far."""

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
            self.unit = self._store.name
        except OSError as error:
            raise RankError(f"expert_group {self._place.folder}: {error.strerror}") from error
        except (GroupError, CollectiveError) as error:
            raise RankError(str(error)) from error

    def count(self, pairs: PairCount | None) -> None:
        """See `Ranks`."""
        assert pairs is not None, "it has some experts"
        pairs.tell = self._computed.append

    def loads(self) -> Sequence[RankLoad]:
        """See `Ranks`. Each worker tells its own part."""
        return [RankLoad(self._place.rank, 0, None, None, 0, *self._computed)]

    def check(self) -> None:
        """See `Ranks`."""
        if self.lost:
            raise RankError(self.lost)

    def agree(self, revision: str, num_pages: int) -> int:
        """See `Ranks`. Each worker has a pool of its own size."""
        try:
            self._member.loaded(revision)
        except CollectiveError as error:
            raise RankError(str(error)) from error
        return num_pages

    def join(self) -> None:
        """See `Ranks`."""
        errors = list[Exception]()

        def meet() -> None:
            try:
                self._moves.join(self._store)
            except Exception as error:
                errors.append(error)

        # On a thread of its own: it would wait for a worker that is gone.
        meeting = threading.Thread(target=meet, name="baton-experts-join", daemon=True)
        meeting.start()
        while meeting.is_alive():
            self.check()
            meeting.join(_LOOK_S)
        self.check()
        if errors:
            raise RankError(f"the expert group cannot be joined: {errors[0]}")

    def wait_until_ready(self) -> None:
        """See `Ranks`. Until then a step of one would run experts that another has not finished."""
        try:
            self._member.finished()
        except CollectiveError as error:
            raise RankError(str(error)) from error

    def executor(self, own: Executor) -> Executor:
        """See `Ranks`."""
        if isinstance(self._moves, GlooDispatch):
            return GroupExecutor(own, self._moves.failed)
        from engine.cuda.executor import CudaExecutor
        from engine.cuda.groups.executor import GroupedCudaExecutor

        assert isinstance(own, CudaExecutor), "others are refused"
        return GroupedCudaExecutor(own, self._moves)

    def call_when_lost(self, on_lost: Callable[[str], None]) -> None:
        """See `Ranks`."""
        self._member.on_lost = on_lost
        if self.lost:
            on_lost(self.lost)

    def close(self) -> None:
        """See `Ranks`."""
        if self._is_started:
            self._member.close()
            self._moves.let_go()
        if self._leader is not None:
            self._leader.close()
            self._leader = None


def _dispatch_on(device: torch.device, place: GroupPlace) -> GlooDispatch | CudaDispatch:
    if device.type == "cpu":
        return GlooDispatch(place.rank, place.ranks)
    from engine.cuda.groups.dispatch import CudaDispatch

    return CudaDispatch(place.rank, place.ranks, device)


def _alike(config: EngineConfig, ranks: int) -> Message:
    """What all workers of a group must have alike. On GPUs they capture the same graphs."""
    described = Path(config.model) / "config.json"
    content = described.read_bytes() if described.is_file() else config.model.encode()
    model = hashlib.sha256(content).hexdigest()[:16]
    alike: Message = {
        "ranks": ranks,
        "model": model,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "load_format": config.load_format,
        "device": torch.device(config.device).type,
        "seed": config.seed if config.load_format == "dummy" else None,
    }
    if alike["device"] != "cpu":
        alike |= {name: getattr(config, name) for name in _OF_GRAPHS}
    return alike
