"""Graphs of steps: a step's kernels as one launch."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class StepGraph(NamedTuple):
    """The graph of a shape."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor | None
    """None: it has no prompts. The next replay of any shape may overwrite it, and the others."""
    logits: Tensor
    spoilt: Tensor | None
    head: torch.cuda.CUDAGraph | None
    """What a draft head does once the tokens are drawn; None: there is none."""

    def go_on(self) -> None:
        """The tokens are drawn."""
        if self.head is not None:
            self.head.replay()


@contextmanager
def captured(memory: Any) -> Iterator[torch.cuda.CUDAGraph]:
    """A graph of what is queued inside, on the current stream. `memory`: the pool of all graphs."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(memory, capture_error_mode="thread_local")
    try:
        yield graph
    finally:
        graph.capture_end()


def replay_s(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds of a replay, on the current stream: the median of five."""
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(times))
