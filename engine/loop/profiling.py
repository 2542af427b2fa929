"""A profile of the next steps, on request, with the loop's verbs as ranges in it.

Life of a profile:

1. ASKED.
2. RECORDING, from the next launch on. It ends after the requested number of steps, or when no step
   has run for a while.
3. WRITTEN as a Chrome trace. A thread of its own does this, since it takes seconds and the step
   loop has requests to serve.

Outside a profile the verbs are NVTX ranges on a GPU, which Nsight Systems shows. On a CPU they do
nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger("baton.engine")

QUIET_S: Final = 10.0
"""A profile ends when no step was launched for this many seconds."""
_NOTHING: Final = contextlib.nullcontext()


class ProfileRequest(NamedTuple):
    """The number of steps to record, and the folder for the result."""

    steps: int
    folder: Path


class StepProfiler:
    """Records profiles. The step loop uses it on its thread; any thread may call `request`."""

    def __init__(self, *, nvtx: bool = False) -> None:
        self._nvtx = nvtx
        self._asked: ProfileRequest | None = None
        self._request: ProfileRequest | None = None
        """The request that is being recorded."""
        self._profile: profile | None = None
        self._steps_left = 0
        self._last_step = 0.0

    def request(self, steps: int, folder: Path) -> None:
        """Records the next steps. A request during another profile follows it."""
        self._asked = ProfileRequest(steps, folder)

    def verb(self, name: str) -> AbstractContextManager[object]:
        """A range around one verb of the loop."""
        if self._profile is not None:
            return record_function(name)
        if self._nvtx:
            return torch.cuda.nvtx.range(name)
        return _NOTHING

    def launching(self) -> None:
        """A step is about to be launched."""
        if self._profile is None and self._asked is not None:
            self._begin(self._asked)
        self._steps_left -= 1
        self._last_step = time.monotonic()

    def is_over(self) -> bool:
        """Whether to end the profile now. The end takes a moment, which must be announced first."""
        if self._profile is None:
            return False
        return self._steps_left < 0 or time.monotonic() - self._last_step > QUIET_S

    def end(self) -> None:
        """Ends the profile and starts to write it."""
        done, request = self._profile, self._request
        if done is None or request is None:
            return
        self._profile = None
        try:
            done.stop()
        except Exception:
            log.exception("the profile failed")
            return
        threading.Thread(target=_write, args=(done, request.folder), daemon=True).start()

    def _begin(self, request: ProfileRequest) -> None:
        self._asked, self._request, self._steps_left = None, request, request.steps
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        try:
            self._profile = profile(activities=activities, experimental_config=_all_threads())
            self._profile.start()
        except Exception:
            log.exception("the profiler cannot start")
            self._profile = None
        else:
            log.info("profile begins", extra={"steps": request.steps})


def _all_threads() -> _ExperimentalConfig:
    """Options to record all threads. On a CPU the operators run on the device's thread, which is
    not the one that starts the profile."""
    return _ExperimentalConfig(profile_all_threads=True)


def _write(done: profile, folder: Path) -> None:
    path = folder / f"baton-{os.getpid()}-{time.strftime('%Y%m%d-%H%M%S')}.trace.json.gz"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done.export_chrome_trace(str(path))
    except Exception:
        log.exception("the profile cannot be written")
    else:
        log.info("profile written", extra={"path": str(path)})
