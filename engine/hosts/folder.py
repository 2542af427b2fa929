"""The private folder of a process and its ranks, and what killed processes have left of theirs.

A process holds a lock in its folder, which the kernel lets go of with the process, in whichever
namespace its ids count. So a folder whose lock is free has no owner any more. A folder gets its
name when it is locked, so nobody takes a new one for one that was left.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "baton-ranks-"
MOST_LOOKED_AT: Final = 256
"""Most folders of a start that are looked at, so that a start stays short. The next one goes on."""
_LOCK: Final = "owner"


class PrivateFolder:
    """A folder that only this user may use, until `remove`. What others have left goes before."""

    def __init__(self) -> None:
        """Makes it.

        Raises:
            OSError: there is no place for it.
        """
        with suppress(OSError):  # Some folders can be written to, and not listed.
            remove_left()
        made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(made.name[1:]))

    def remove(self) -> None:
        """Removes it with all that is in it. Nothing happens the second time."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_left() -> None:
    """Removes folders of this user whose owners are gone."""
    with os.scandir(tempfile.gettempdir()) as entries:
        named = (Path(entry) for entry in entries if entry.name.startswith(PREFIX))
        for folder in itertools.islice(named, MOST_LOOKED_AT):
            with suppress(OSError):  # In use, or another one removes it.
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    held = folder.lstat()
    if not stat.S_ISDIR(held.st_mode) or held.st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
