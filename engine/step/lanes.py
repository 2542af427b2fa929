"""Which sequences decode in the next step, where several steps are in flight.

Through one stage, all sequences decode in each step, and the next step is launched before the
tokens of this one are known: the device has them.

Through S stages, the drawn tokens are in the last stage, and the first one needs them. So a
sequence decodes again when its step has settled. Meanwhile the others decode: each step takes at
most 1/S of them, those that have waited longest, and S such steps are in flight. A prompt's chunk
needs only what chunks before it store, and stages run steps in order. So it is a step of its own,
launched behind them, which no row waits for longer than a stage takes for it.

K chunks through S stages take as long as K + S - 1 of a stage. So a prompt that waits alone has
smaller chunks than many, which fill the stages one behind the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

STAGE_CHUNKS: Final = 3
"""Chunks of a prompt for each stage: with two stages, the first and the last one wait for 1/7 of
the time. Not tuned."""
_LEAST_CHUNK: Final = 512
"""Tokens. Reading the weights takes as long as the products of about 300 on an H100. Not tuned."""
_CHUNK_GRID: Final = 64
"""Tokens. Graphs of prompts have sizes so far apart."""
Rows = NDArray[np.intp]
Int32s = NDArray[np.int32]

_LOOKAHEAD: Final = 2
"""Steps in flight through one stage: the one that the device runs, and the next."""


class Lanes(Protocol):
    """Belongs to the step loop's thread."""

    flights: int
    """Most steps in flight."""
    waits: bool
    """Whether a sequence decodes only when its last token is known on the host. Then steps carry
    the tokens of their rows, and have either rows or prompts."""

    def choose(self, running: Rows, in_flight: Int32s) -> Rows:
        """The slots that decode in the next step, in their order.

        Args:
            running: slots of all sequences that decode.
            in_flight: by slot, the steps in flight that draw a token for it.
        """
        ...

    def chunk(self, waiting: Iterable[int], most: int) -> int:
        """The prompt tokens of a step, at most `most`. The prompts that are not computed whole have
        so many each."""
        ...

    def launched(self, number: int, rows: Rows) -> None:
        """A step with these rows is launched."""
        ...

    def over(self, number: int) -> None:
        """This step and all before it are over."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether what waits for a step can wait for one with rows, which will come."""
        ...


class OneLane:
    """All sequences decode in each step."""

    flights = _LOOKAHEAD
    waits = False
    is_busy = False

    def choose(self, running: Rows, in_flight: Int32s) -> Rows:
        """See `Lanes`."""
        return running

    def chunk(self, waiting: Iterable[int], most: int) -> int:
        """See `Lanes`."""
        return most

    def launched(self, number: int, rows: Rows) -> None:
        """See `Lanes`."""

    def over(self, number: int) -> None:
        """See `Lanes`."""


class StageLanes:
    """Lanes of decode rows through several stages. They even out by themselves: the share of a step
    follows from how many sequences run now."""

    waits = True

    def __init__(self, stages: int, max_slots: int) -> None:
        self._stages = stages
        self.flights = stages + 1
        self._steps: deque[int] = deque()
        """Steps with rows that are in flight, oldest first."""
        self._last = np.zeros(max_slots, np.int64)
        """By slot, the step that had it last."""

    @property
    def is_busy(self) -> bool:
        """See `Lanes`."""
        return bool(self._steps)

    def choose(self, running: Rows, in_flight: Int32s) -> Rows:
        """See `Lanes`."""
        if len(self._steps) >= self._stages:
            return running[:0]
        ready, most = running[in_flight[running] == 0], -(-running.size // self._stages)
        if ready.size > most:
            longest = np.argsort(self._last[ready], kind="stable")[:most]
            ready = ready[np.sort(longest)]
        rows: Rows = ready
        return rows

    def chunk(self, waiting: Iterable[int], most: int) -> int:
        """See `Lanes`."""
        chunks, total = STAGE_CHUNKS * self._stages, 0
        for tokens in waiting:
            total += tokens
            if total >= chunks * most:
                return most
        each = -(-total // (chunks * _CHUNK_GRID)) * _CHUNK_GRID
        return min(most, max(_LEAST_CHUNK, each))

    def launched(self, number: int, rows: Rows) -> None:
        """See `Lanes`."""
        if rows.size:
            self._steps.append(number)
            self._last[rows] = number

    def over(self, number: int) -> None:
        """See `Lanes`."""
        while self._steps and self._steps[0] <= number:
            self._steps.popleft()


def lanes_of(stages: int, max_slots: int) -> Lanes:
    """The lanes of a pipeline of so many stages."""
    return OneLane() if stages == 1 else StageLanes(stages, max_slots)
