"""One GPU a worker: a lock for each GPU, in a folder that the workers of a host share.

Life of a slot:

1. FREE: nobody holds the lock of its file.
2. CLAIMED: a worker holds it, from before it touches a GPU until it ends; the file says who.
3. The worker ends, however it ends: the kernel drops the lock with the process, and the slot is
   FREE. Nothing has to be cleaned up, not even after SIGKILL.

A slot says which GPU is whose among Baton's workers; it keeps nobody else off a GPU. The folder has
to be on one host's own disk or memory: locks over NFS are another matter.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import IO

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


class NoSlotError(Exception):
    """No GPU can be claimed; the message says why."""


def visible_gpus() -> list[str]:
    """GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    if (chosen := os.environ.get(VISIBLE)) is not None:
        return [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    nodes = Path("/dev").glob("nvidia[0-9]*")
    return [str(i) for i, _ in enumerate(n for n in nodes if re.fullmatch(r"nvidia\d+", n.name))]


@contextlib.contextmanager
def claimed(folder: Path, gpus: Sequence[str], holder: str) -> Iterator[str]:
    """Holds the first free GPU of `gpus` as long as the context is open, and yields its name.

    Args:
        folder: shared by all who claim; made where it is missing.
        gpus: as `visible_gpus` names them.
        holder: who claims, for the message that others get.

    Raises:
        NoSlotError: every GPU is claimed, or the folder cannot be used.
    """
    taken: list[str] = []
    for gpu in gpus:
        file = _open(folder, gpu)
        with file:
            if _lock(file):
                _write(file, holder)
                yield gpu
                return
            file.seek(0)
            taken.append(f"{gpu} by {file.read().strip() or 'another worker'}")
    raise NoSlotError(
        f"no GPU is left here for {holder}: claimed are {', '.join(taken)}"
        if taken
        else f"no GPU is visible here for {holder}"
    )


@contextlib.contextmanager
def claimed_for(device: str, folder: str, holder: str) -> Iterator[str]:
    """Claims a GPU for a worker and hides all others from this process, before CUDA is touched.

    Args:
        device: the worker's setting; `cpu` claims nothing, nor does `auto` where there is no GPU.
        folder: the worker's setting; "" claims nothing.
        holder: the worker's name.

    Yields:
        The GPU's name, "" where nothing is claimed.

    Raises:
        NoSlotError: as `claimed`.
    """
    gpus = visible_gpus()
    if not folder or device == "cpu" or (device == "auto" and not gpus):
        yield ""
        return
    with claimed(Path(folder), gpus, holder) as gpu:
        # The order of the device files, which all workers share; CUDA's own is by speed.
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        os.environ[VISIBLE] = gpu
        yield gpu


def _open(folder: Path, gpu: str) -> IO[str]:
    path = folder / f"gpu-{gpu.replace('/', '-')}.lock"
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
