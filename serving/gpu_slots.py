"""Gives each worker of a host GPUs of its own, by a lock for each GPU in a shared folder.

Life of a slot:

1. FREE: nobody holds the lock of its file.
2. CLAIMED: a worker holds the lock before it touches a GPU, and until it ends. The file names it.
3. The worker ends, by whatever cause. The kernel drops the lock with the process, and the slot is
   FREE. Nothing has to be cleaned up, not even after SIGKILL.

A worker holds one more lock while it chooses. Else two workers of two ranks could hold one of the
last two GPUs each, and both give up.

Slots share out GPUs among Baton's workers. They keep no other program off a GPU. The folder must be
on the host's own disk or in its memory, because locks over NFS are not reliable.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import IO

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
CHOOSING_S: Final = 10.0
"""So long does a worker wait until others have chosen, which takes milliseconds."""
_POLL_S: Final = 0.01
"""A slot whose owner ends is free at once, and nobody is notified."""


class NoSlotError(Exception):
    """No GPU can be claimed; the message says why."""


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, whoever may use it."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, by their names in `CUDA_VISIBLE_DEVICES`."""
    if (chosen := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    nodes = Path("/dev").glob("nvidia[0-9]*")
    return [str(i) for i, _ in enumerate(n for n in nodes if re.fullmatch(r"nvidia\d+", n.name))]


def shared_out(gpus: Sequence[str], ranks: Sequence[int]) -> list[tuple[str, ...]]:
    """The GPUs of each worker, in turn, a different one for each of its ranks. Without GPUs no
    worker has any.

    Raises:
        NoSlotError: a worker has more ranks than there are GPUs.
    """
    count = len(gpus)
    if 0 < count < (most := max(ranks)):
        raise NoSlotError(
            f"a worker of {most} ranks needs {most} GPUs, and {count} can be seen here"
            f" (--tp {count}, or --device cpu)"
        )
    shares, at = [], 0
    for own in ranks:
        places = range(at, at + own) if gpus else ()
        shares.append(tuple(gpus[place % count] for place in places))
        at += own
    return shares


@contextlib.contextmanager
def claimed(folder: Path, gpus: Sequence[str], holder: str, count: int = 1) -> Iterator[str]:
    """Holds the first free GPUs of `gpus` as long as the context is open: as many as a worker has
    ranks, or none. Yields their names, with commas between them.

    Args:
        folder: all workers of the host share it; it is made if it is missing.
        gpus: names as in `visible_gpus`.
        holder: name of the worker, for the error that others get.
        count: GPUs that it wants.

    Raises:
        NoSlotError: too many GPUs are claimed, or the folder cannot be used.
    """
    taken, own = list[str](), list[str]()
    if not gpus:
        raise NoSlotError(f"no GPU is visible here for {holder}")
    with contextlib.ExitStack() as files:
        with _choosing(folder):
            for gpu in gpus:
                file = files.enter_context(_open(folder, f"gpu-{gpu.replace('/', '-')}.lock"))
                if _lock(file):
                    _write(file, holder)
                    own.append(gpu)
                else:
                    file.seek(0)
                    taken.append(f"{gpu} by {file.read().strip() or 'another worker'}")
                if len(own) == count:
                    break
            else:
                files.close()  # Before another one chooses.
        if len(own) == count:
            yield ",".join(own)
            return
    left = f"no GPU is left here for {holder}"
    if count > 1:
        left = f"{len(own)} of {count} GPUs are left here for {holder}"
    raise NoSlotError(f"{left}: claimed are {', '.join(taken) or 'none'}")


@contextlib.contextmanager
def claimed_for(device: str, folder: str, holder: str, ranks: int = 1) -> Iterator[str]:
    """Claims a GPU for each of a worker's ranks and hides all others from this process, before CUDA
    is touched.

    Args:
        device: the worker's setting; `cpu` claims nothing, and `auto` nothing if there is no GPU.
        folder: the worker's setting; "" claims nothing.
        holder: the worker's name.
        ranks: number of its ranks.

    Yields:
        The GPUs' names, with commas between them; "" if nothing is claimed.

    Raises:
        NoSlotError: too many GPUs are claimed, or the folder cannot be used.
    """
    gpus = visible_gpus()
    if not folder or device == "cpu" or (device == "auto" and not gpus):
        yield ""
        return
    with claimed(Path(folder), gpus, holder, ranks) as gpu:
        # All workers count GPUs in the order of the device files. CUDA's own order is by speed.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        os.environ[VISIBLE] = gpu
        yield gpu


@contextlib.contextmanager
def _choosing(folder: Path) -> Iterator[None]:
    """No other worker chooses meanwhile."""
    until_s = time.monotonic() + CHOOSING_S
    with _open(folder, "choosing") as file:
        while not _lock(file):
            if time.monotonic() >= until_s:
                raise NoSlotError(f"another worker has been choosing GPUs in {folder} for long")
            time.sleep(_POLL_S)
        yield


def _open(folder: Path, name: str) -> IO[str]:
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+")
    except OSError as error:
        raise NoSlotError(f"{path} cannot be used: {error.strerror}") from None


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(file: IO[str], holder: str) -> None:
    file.truncate()
    file.write(f"{holder}\n")
    file.flush()
