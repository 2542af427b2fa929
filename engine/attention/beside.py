"""Runs work on a device beside other work."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import torch


class Beside:
    """A second stream of a GPU, also within a graph's capture. On a CPU all work runs in turn.

    Work queued inside `with` runs after the work queued before, and beside the work queued next;
    work queued after `wait` runs after it. Memory that is allocated inside is reused inside a later
    one at the earliest, and that one begins after everything queued before it. Memory that is
    allocated outside must not be freed before `wait`.

    Every layer of a step without a graph enters it, so it keeps its events, and asks torch for the
    current stream once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._before, self._after = torch.cuda.Event(), torch.cuda.Event()

    def __enter__(self) -> None:
        if self._stream is None:
            return
        self._outside = torch.cuda.current_stream(self._stream.device_index)
        self._before.record(self._outside)
        self._stream.wait_event(self._before)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        if self._stream is None:
            return
        torch.cuda.set_stream(self._outside)
        self._after.record(self._stream)

    def wait(self) -> None:
        """Work queued from now on runs after the work inside."""
        if self._stream is not None:
            self._outside.wait_event(self._after)
