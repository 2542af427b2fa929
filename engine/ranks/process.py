"""What rank 0 and the other ranks tell each other beside steps, and how a rank's process ends.

1. Rank 0 starts a process for each other rank, with torchrun's names in its environment and a
   private folder: `CONFIG` lies there, and so do the sockets and the store of the group.
2. A rank loads its part and reports `LOADED`, or `FAILED`, and ends.
3. Rank 0 sends `PAGES`, the smallest pool of all. All join the group. A rank reports `READY`.
4. Rank 0 sends `STEP` after `STEP`, and at last `STOP`.

A rank that has any error reports `FAILED` and ends. It also ends with the thread that started it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from engine.config import EngineConfig

CONFIG: Final = "config.json"
STORE: Final = "store"
REPORTS: Final = "reports"
"""The socket of all reports."""
PAGES: Final = b"pages"
STEP: Final = b"step"
STOP: Final = b"stop"
LOADED: Final = "loaded"
READY: Final = "ready"
FAILED: Final = "failed"


def address(folder: Path, name: str) -> str:
    """The address of a socket in the private folder."""
    return f"ipc://{folder / name}"


def steps_of(rank: int) -> str:
    """The socket on which a rank gets its steps."""
    return f"steps-{rank}"


def environment(rank: int, size: int, threads: int) -> dict[str, str]:
    """torchrun's names, for a worker's ranks on one host."""
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in {**here, "OMP_NUM_THREADS": threads}.items()}


def write_config(config: EngineConfig, folder: Path) -> None:
    """Leaves the configuration for the ranks."""
    content = asdict(config) | {"eos_token_ids": sorted(config.eos_token_ids)}
    (folder / CONFIG).write_text(json.dumps(content), encoding="utf-8")


def read_config(folder: Path) -> EngineConfig:
    """The configuration that rank 0 left."""
    content: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return EngineConfig(**content | {"eos_token_ids": frozenset(content["eos_token_ids"])})
