"""Figures of several invocations are summed up sample by sample."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from chaos.arena import Arena
from chaos.faults import fired, inflicted
from chaos.figures import Figures
from chaos.plan import Fault, Topology

if TYPE_CHECKING:
    from cluster import Cluster


def test_what_was_written_is_summed_up(tmp_path: Path) -> None:
    one = Figures(runs=2, faults=Counter(kill=3), stalls_s=[0.1, 0.3], detected_s={"killed": [1.0]})
    other = Figures(
        runs=1, faults=Counter(kill=1, freeze=1), stalls_s=[0.2], detected_s={"killed": [3.0]}
    )
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    one.write(files[0], seed=1)
    other.write(files[1], seed=2)
    summary = Figures.read(files).summary()
    assert summary["runs"] == 3
    assert summary["faults"] == {"kill": 4, "freeze": 1}
    assert summary["stall_ms"] == {"count": 3, "p50": 200.0, "p99": 300.0, "max": 300.0}
    assert summary["detected_ms"]["killed"]["max"] == 3000.0


class OfTheDead(Arena):
    """Its workers ended, each of its fault."""

    def _fetch(self, name: str, path: str, body: bytes | None) -> str:
        raise ConnectionRefusedError(name, path, body)

    def start_armed(self, name: str, specification: str) -> None:
        self.armed = {**getattr(self, "armed", {}), name: specification}

    async def ready(self) -> None:
        """None is."""

    async def tend(self) -> None:
        """Nobody is to be started."""

    def pid(self, name: str) -> int:
        return len(name)


async def test_what_fires_below_workers_is_counted_by_its_own_point(tmp_path: Path) -> None:
    """Two faults below one worker, one of them below another, too. What fired before is left
    out."""
    dead = SimpleNamespace(logs=tmp_path)
    arena = OfTheDead(cast("Cluster", dead), Topology(1, 1))
    lines = [
        "WARNING faults.failpoints: failpoint fires: store.load\n",
        "rank 1: WARNING failpoint fires: rank.step\n",
    ]
    (tmp_path / "prefill-0.log").write_text(lines[0])
    (tmp_path / "decode-0.log").write_text("")
    arena.fired_before = {name: arena.fired_below(name) for name in ("prefill-0", "decode-0")}
    (tmp_path / "prefill-0.log").write_text(2 * lines[0] + lines[1])
    (tmp_path / "decode-0.log").write_text(lines[0])
    faults = [
        Fault("below", 0, "prefill-0", "store.load=kill@2"),
        Fault("below", 0, "prefill-0", "rank.step=raise~1@1"),
        Fault("below", 0, "decode-0", "store.load=kill@2"),
    ]
    assert await fired(arena, faults) == {"store.load": 2, "rank.step": 1}
    async with inflicted(arena, faults):
        both = "store.load=kill@2,rank.step=raise~1@1"
        assert arena.armed == {"prefill-0": both, "decode-0": "store.load=kill@2"}
    assert arena.armed == {"prefill-0": "", "decode-0": ""}
