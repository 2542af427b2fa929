"""A process that tries how much memory can be had, and hands it over.

    python -m engine.tiers.touching BYTES SOCKET

It makes a memory file, asks for its pages step by step, and after each step reports how many bytes
it has. When all are there it sends the file. If memory runs out, the kernel ends this process, not
the worker, and the pages are free again with it. So a container's limit counts, too, which no
figure of the machine shows.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

STEP_BYTES: Final = 256 << 20
STUCK_S: Final = 60.0
"""A step that takes longer than this many seconds has failed."""
_COUNT: Final = struct.Struct("<q")


class HostMemoryError(Exception):
    """Less memory can be touched than is wanted. The message has both sizes."""


def touched_file(size: int) -> int:
    """A file descriptor of memory of `size` bytes, all of which is there. Close it.

    Raises:
        HostMemoryError: less can be touched.
    """
    check_total(size)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-P", "-m", __name__, str(size), str(theirs.fileno())]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            return _receive(ours, size)
        finally:
            child.kill()
            child.wait()


def check_total(size: int) -> None:
    """Whether a machine as large as this one could have so much.

    Raises:
        HostMemoryError: it is smaller.
    """
    total = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    if size > total:
        raise HostMemoryError(_too_much(size, total, "this machine has"))


def _receive(child: socket.socket, size: int) -> int:
    touched = 0
    while select.select([child], [], [], STUCK_S)[0]:
        message, fds, _, _ = socket.recv_fds(child, _COUNT.size, 1)
        if fds:
            return fds[0]
        if len(message) < _COUNT.size:
            break
        (touched,) = _COUNT.unpack(message)
    raise HostMemoryError(_too_much(size, touched, "could be touched:"))


def _too_much(wanted: int, found: int, verb: str) -> str:
    gib = 1 << 30
    return (
        f"{wanted / gib:.2f} GiB of host memory are wanted for KV pages, {verb} {found / gib:.2f}"
    )


def _touch(size: int, parent: socket.socket) -> None:
    with suppress(OSError):  # The kernel ends this process first if memory runs out.
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
    for start in range(0, size, STEP_BYTES):
        end = min(size, start + STEP_BYTES)
        try:
            os.posix_fallocate(fd, start, end - start)
        except OSError:
            return
        parent.sendall(_COUNT.pack(end))
    socket.send_fds(parent, [_COUNT.pack(size)], [fd])


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[2])) as to_parent:
        _touch(int(sys.argv[1]), to_parent)
