"""The results of a batch, which are also the record of what is done.

A result is appended whole, by one write, and a line counts as done when its result is there. So a
process that is killed loses only requests that were under way. Started again, it reads the results,
cuts off a line that was written in part, and goes on with the others. Nobody else may write the
file meanwhile: the process holds a lock on it, which the kernel takes back when the process ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from console.batching.lines import BatchError


class Journal:
    """The file of results. Any thread may write."""

    def __init__(self, path: Path) -> None:
        """Opens or makes it, and reads what is done.

        Raises:
            BatchError: another process writes it, or it is no file of results.
            OSError: it cannot be opened.
        """
        self._path = path
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BatchError(f"{path}: another process writes it") from None
            self.done = self._read()
            """The custom_id of each line that is done, by the result's id."""
        except BaseException:
            os.close(self._file)
            raise

    def _read(self) -> dict[str, str]:
        done: dict[str, str] = {}
        whole = 0
        with self._path.open("rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    break
                try:
                    result = json.loads(data)
                    done[result["id"]] = result["custom_id"]
                except (ValueError, TypeError, KeyError):
                    raise BatchError(f"{self._path} is no file of results") from None
                whole += len(data)
        os.ftruncate(self._file, whole)
        return done

    def write(self, result: Mapping[str, Any]) -> None:
        """Appends a result."""
        data = memoryview(json.dumps(result, ensure_ascii=False).encode() + b"\n")
        with self._lock:
            while data:  # A write takes all of it, unless the disk is full.
                data = data[os.write(self._file, data) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._file)
        os.close(self._file)
