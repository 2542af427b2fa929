"""What rank 0 and the other ranks tell each other beside steps, and how a rank's process ends.

1. Rank 0 starts a process for each other rank, with torchrun's names in its environment and a
   private folder: `CONFIG` lies there, and so do the sockets and the store of the group. On other
   hosts an agent does so, and the sockets are of TCP (`engine.hosts`).
2. A rank loads its part and reports `LOADED`, or `FAILED`, and ends.
3. Rank 0 sends `PAGES`, the smallest pool of all. All join the group. What runs beside a rank's
   steps, such as its part of the hand-off, begins on a thread of its own. It has a socket to
   rank 0, `BESIDE`. Copies to and from host memory have threads and sockets, too. A rank reports
   `READY`.
4. Rank 0 sends `STEP` after `STEP`, before some of them `ADAPTER` (`engine.ranks.steps`), and at
   last `STOP`.

A rank that has any error reports `FAILED` and ends. It also ends with the thread that started it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from engine.config import EngineConfig

CONFIG: Final = "config.json"
BESIDE: Final = "beside"
HELLO: Final = b"hello"
"""First on each socket of a rank's own: the connection stands, so the folder may go."""
REPORTS: Final = "reports"
"""The socket of all reports."""
PAGES: Final = b"pages"
STEP: Final = b"step"
ADAPTER: Final = b"adapter"
STOP: Final = b"stop"
LOADED: Final = "loaded"
READY: Final = "ready"
FAILED: Final = "failed"


def steps_of(rank: int) -> str:
    """The socket on which a rank gets its steps."""
    return f"steps-{rank}"


def beside_of(rank: int) -> str:
    """The socket of what runs beside a rank's steps."""
    return f"{BESIDE}-{rank}"


def copies_of(rank: int, direction: str) -> str:
    """The socket of a rank's copies in one direction; see `engine.ranks.copies`."""
    return f"{direction}-{rank}"


def config_text(config: EngineConfig, beside: str) -> str:
    """What ranks need: the configuration, and the name of what runs beside their steps."""
    content = asdict(config) | {"eos_token_ids": sorted(config.eos_token_ids), BESIDE: beside}
    return json.dumps(content)


def read_config(folder: Path) -> tuple[EngineConfig, str]:
    """What rank 0 left, or the agent of this host."""
    content: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    beside = content.pop(BESIDE)
    config = EngineConfig(**content | {"eos_token_ids": frozenset(content["eos_token_ids"])})
    return config, beside
