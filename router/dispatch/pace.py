"""How fast the requests of a model are served, and when another one would be done.

Work is counted in tokens: those of a prompt when its first token comes, those of the output as they
come. The rate is work per second of the time in which something waited and something ran. Neither
idle time nor work beside an empty queue says how fast a backlog drains, so neither is counted. Both
sums of the rate decay, so that it follows a worker that was lost.

A request that comes now is done after

    wait_s + service_s        wait_s = work that goes before it / rate
                              service_s = first_s + output tokens x token_s

`first_s` and `token_s` are running means of what requests took once they were dispatched. How long
an output becomes is not known: the running mean of the model is taken, within the request's own
limits. The estimate of the wait is a mean, too. So half of the requests that just fit would be late
if it were taken as it is; `needed_s` takes it twice. A queue need not be long to keep workers busy.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.jobs import Demand

WINDOW_S: Final = 10.0
"""Memory of the rate: long enough to span bursts, short enough to see a lost worker."""
MEASURED_S: Final = 1.0
"""A backlog of less time, all in all, says nothing: work comes in lumps."""
REMEMBERED: Final = 100
"""Requests that a running mean remembers."""


class Mean:
    """A running mean: of all values at first, later mostly of the last `REMEMBERED`."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Takes a value."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, REMEMBERED)


class Pace:
    """The pace of one model. Times are seconds, work is tokens."""

    def __init__(self) -> None:
        self._work = 0.0
        self._busy_s = 0.0
        self._output_tokens = Mean()
        self._first_s = Mean()
        self._token_s = Mean()
        self.is_backlogged = False
        """Whether something waits; the queue says so."""
        self.running = 0
        """Attempts under way; they say so."""

    def backlog(self, duration_s: float) -> None:
        """Something waited during the last `duration_s`. Where nothing runs all are waiting for a
        worker to come back, which says nothing about its pace."""
        if not self.running:
            return
        kept = math.exp(-duration_s / WINDOW_S)
        self._work *= kept
        self._busy_s = self._busy_s * kept + WINDOW_S * (1 - kept)

    def done(self, work: int) -> None:
        """Workers have done this much more."""
        if self.is_backlogged:
            self._work += work

    def served(self, first_s: float, decode_s: float, output_tokens: list[int]) -> None:
        """A request ended by itself.

        Args:
            first_s: from its dispatch to the first token.
            decode_s: from there to the last one.
            output_tokens: of each choice; they are generated side by side.
        """
        self._first_s.add(first_s)
        for tokens in output_tokens:
            self._output_tokens.add(tokens)
        if (longest := max(output_tokens, default=0)) > 1:
            self._token_s.add(decode_s / (longest - 1))

    def output_tokens(self, demand: Demand) -> int:
        """How long each choice is likely to become."""
        if not self._output_tokens.count:
            return demand.max_tokens
        return min(demand.max_tokens, math.ceil(self._output_tokens.value))

    def work(self, demand: Demand) -> int:
        """How much a request is likely to be."""
        return demand.prompt_tokens + demand.choices * self.output_tokens(demand)

    def service_s(self, demand: Demand) -> float:
        """How long a request is likely to take once it is dispatched; 0 while unknown."""
        return self._first_s.value + self.output_tokens(demand) * self._token_s.value

    def wait_s(self, ahead: int) -> float | None:
        """How long the work `ahead` takes to drain; None while too little was measured."""
        if not ahead:
            return 0.0
        if not self._work or self._busy_s < MEASURED_S:
            return None
        return ahead * self._busy_s / self._work

    def needed_s(self, demand: Demand, wait_s: float) -> float:
        """What a request needs to be surely done that has to wait for `wait_s` or so."""
        return self.service_s(demand) + 2 * wait_s
