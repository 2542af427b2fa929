"""How the processes that an engine starts end: with the thread that started them."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""Number of Linux: sets the signal that a process gets when its parent's thread ends."""


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process with the thread that started it, even if this one is stopped
    or hangs.

    Args:
        parent: the process of that thread. If it is gone already, this process ends now.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
