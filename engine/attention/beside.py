"""Runs work on a device beside other work."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """A second stream of a GPU, also within a graph's capture. On a CPU all work runs in turn.

    Memory that is allocated inside `work` is reused inside a later `work` at the earliest, and that
    one begins after everything queued before it. Memory that is allocated outside must not be freed
    before `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Work queued inside runs after the work queued before, and beside the work queued next."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Work queued from now on runs after the work inside `work`."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
