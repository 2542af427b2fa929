"""Work that a device does beside other work."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """A second stream of a GPU, also within a graph's capture. On a CPU all is done in turn.

    Memory: what is allocated inside `work` is used again inside a later `work` at the earliest,
    which begins behind everything queued before it; what is allocated outside is not let go before
    `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is queued inside runs behind what was queued before, beside what is queued next."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """What is queued from now on runs behind the work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
