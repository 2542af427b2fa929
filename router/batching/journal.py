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
from typing import Any, Final, Self

from router.batching.lines import BatchError, went_well
from router.one_line import json_line

_BEGUN: Final = b'{"id":"batch_req_'
"""Every result begins so, but for spaces."""


class TakenError(BatchError):
    """Another process writes the results."""


class Journal:
    """The file of results. Any thread may write."""

    def __init__(self, path: Path, *, make: bool = True) -> None:
        """Opens it, and reads what is done. `make`: it may have to be made, or be a link.

        Raises:
            TakenError: another process writes it.
            BatchError: it is no file of results.
            OSError: it cannot be opened.
        """
        self._path = path
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC
        flags |= os.O_CREAT if make else os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TakenError(f"{path}: another process writes it") from None
            self.done, self.size, self.failed = self._read()
            """The custom_id of each line that was done at first, by the result's id; bytes; and
            results that say that their line failed."""
        except BaseException:
            os.close(self._file)
            raise

    def _read(self) -> tuple[dict[str, str], int, int]:
        done: dict[str, str] = {}
        whole = failed = 0
        with self._path.open("rb") as file:
            for data in file:
                try:
                    if not data.endswith(b"\n"):
                        _check_torn(data)
                        break
                    result = json.loads(data)
                    done[result["id"]] = result["custom_id"]
                    failed += not went_well(result)
                except (ValueError, TypeError, KeyError, RecursionError):
                    raise BatchError(f"{self._path} is no file of results") from None
                whole += len(data)
        os.ftruncate(self._file, whole)
        return done, whole, failed

    def write(self, result: Mapping[str, Any]) -> int:
        """Appends a result, or nothing of it. Returns its bytes.

        Raises:
            BatchError: the journal is closed.
            OSError: the disk is full.
        """
        try:
            line = json_line(result) + b"\n"
        except ValueError:  # Half of a surrogate pair.
            line = json.dumps(result).encode() + b"\n"
        data = memoryview(line)
        with self._lock:
            if self._file < 0:  # The number may be another file's by now.
                raise BatchError("the results are closed")
            try:
                while data:  # A write takes all of it, unless the disk is full.
                    data = data[os.write(self._file, data) :]
            except OSError:
                os.ftruncate(self._file, self.size)
                raise
            self.size += len(line)
            self.failed += not went_well(result)
        return len(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            file, self._file = self._file, -1
            try:
                os.fsync(file)
            finally:
                os.close(file)


def _check_torn(data: bytes) -> None:
    """Checks that a line without an end is the beginning of a result, and no other file's content,
    which would be lost. A machine that stopped may have left zeros.

    Raises:
        ValueError: it is something else.
    """
    begun = data.rstrip(b"\0")[: 2 * len(_BEGUN)].replace(b" ", b"")[: len(_BEGUN)]
    if not _BEGUN.startswith(begun):
        raise ValueError
