"""Ranks' processes that start before there is an order for them.

A rank imports for seconds before it can load anything, and so does its worker. A worker's command
knows the number of its ranks from the settings, so both may import at the same time:

1. WAITING: `start`. The process imports, also what reading a model imports on the way, and then
   reads its order from its standard input.
2. ORDERED: `take` writes the order: the folder and the environment, which are known later. From
   then on it is as any other rank (`engine.ranks.process`).

It ends with the thread that called `start`, with or without an order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

STDERR: Final = 2
"""File descriptor: a rank's output is no protocol, and goes to the log."""
_waiting: Final[list[subprocess.Popen[bytes]]] = []


def launch(
    arguments: Sequence[str], environment: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Starts `python -m engine.ranks`. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.ranks", *arguments, str(os.getpid())],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=stdin,
        stdout=STDERR,
        start_new_session=True,  # The terminal's Ctrl-C reaches the worker alone.
    )


def start(count: int) -> None:
    """Starts so many processes that wait for an order. The calling thread must live as long as they
    may. What cannot be started is left to those who need it."""
    with suppress(OSError):
        for _ in range(count):
            _waiting.append(launch((), os.environ, subprocess.PIPE))


def take(folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Gives one that waits its order. None: none waits."""
    order = json.dumps([str(folder), dict(environment)]).encode()
    while _waiting:
        process = _waiting.pop()
        assert process.stdin is not None, "it was started with a pipe"
        try:
            with process.stdin as pipe:
                pipe.write(order)
            return process
        except OSError:  # It has ended.
            process.wait()
    return None


def ordered() -> str:
    """Waits for the order, in such a process, and takes over its environment; the folder. The
    process ends where none comes."""
    from transformers import AutoConfig

    AutoConfig.for_model("llama")  # Half of all that a rank imports comes with its first config.
    order = sys.stdin.buffer.read()
    if not order:
        os._exit(0)
    folder, environment = json.loads(order)
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    return str(folder)
