"""How fast the requests of a model are served, and when another one would be done.

Work is counted in tokens: those of a prompt when its first token comes, those of the output as they
come. The rate is work per second of the time in which something waited and something ran. Neither
idle time nor work beside an empty queue says how fast a backlog drains, so neither is counted. Both
sums of the rate decay, so that it follows a worker that was lost.

A request that comes now is done after

    wait_s + service_s        wait_s = work that goes before it / rate
                              service_s = first_s + output tokens x token_s

`first_s` and `token_s` are what requests took lately once they were dispatched, beside as many as
run now (`Trend`); for `token_s` an answer counts by its tokens. Those that were cut at their
deadline count, too: else all that is remembered was in time. How long an output becomes is not
known: the running mean of the model is taken, within the request's own limits. The estimates are
means. So half of the requests that just fit would be late if they were taken as they are.
`needed_s` takes the wait twice; a queue need not be long to keep workers busy. It lengthens the
service by twice the part by which such estimates were off lately, which nineteen of twenty are
within if errors are normal.
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
"""Requests that a running mean remembers, and tokens after which their time is known."""
LEVEL: Final = 0.25
"""Variance of the number that ran; less is too little to tell how it matters."""


class Mean:
    """A running mean: of all values at first, later mostly of the last `REMEMBERED`."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        """Takes a value."""
        self.count += 1
        self.value += (value - self.value) / min(self.count, REMEMBERED)


class Trend:
    """A time that grows with the number of requests that run: a line through the values, of which
    mostly the last `REMEMBERED` count (weighted least squares). Falling lines are noise, taken as
    level."""

    def __init__(self) -> None:
        self._weight, self._beside, self._value = Mean(), Mean(), Mean()
        self._square, self._product = Mean(), Mean()

    def add(self, value: float, beside: float, weight: float = 1.0) -> None:
        """Takes a value that was seen while `beside` requests ran."""
        self._weight.add(weight)
        self._beside.add(weight * beside)
        self._value.add(weight * value)
        self._square.add(weight * beside * beside)
        self._product.add(weight * beside * value)

    def _mean(self, of: Mean) -> float:
        return of.value / self._weight.value if self._weight.count else 0.0

    @property
    def _spread(self) -> float:
        return self._mean(self._square) - self._mean(self._beside) ** 2

    @property
    def has_slope(self) -> bool:
        """Whether the numbers that were seen differ enough to tell how they matter."""
        return self._spread > LEVEL

    def at(self, beside: float) -> float:
        """The value that is likely while so many run; 0 while unknown."""
        mean, usual = self._mean(self._value), self._mean(self._beside)
        shared = self._mean(self._product) - usual * mean
        slope = max(0.0, shared / self._spread) if self.has_slope else 0.0
        return max(0.0, mean + slope * (beside - usual))


class Pace:
    """The pace of one model. Times are seconds, work is tokens."""

    def __init__(self) -> None:
        self._work = 0.0
        self._busy_s = 0.0
        self._output_tokens = Mean()
        self._first_s = Trend()
        self._token_s = Trend()
        self._steps = 0
        """Tokens that `_token_s` is of."""
        self._off = Mean()
        """How far the services were from their estimates, in parts of these; absolute values. At
        most 1 each: one answer that waited for a lost worker says little of those that follow."""
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

    def served(
        self,
        first_s: float,
        decode_s: float,
        output_tokens: list[int],
        *,
        beside: float = 1.0,
        whole: bool = True,
    ) -> None:
        """A request ended by itself, or was left by its reader.

        Args:
            first_s: from its dispatch to the first token.
            decode_s: from there to the last one.
            output_tokens: of each choice; they are generated side by side.
            beside: requests that ran meanwhile, itself included; a mean.
            whole: whether it ended by itself. If not, its length says nothing.
        """
        steps = max(output_tokens, default=1) - 1
        if likely_s := self._first_s.at(beside) + steps * self._token_s.at(beside):
            self._off.add(min(1.0, abs(first_s + decode_s - likely_s) / likely_s))
        self._first_s.add(first_s, beside)
        for tokens in output_tokens if whole else ():
            self._output_tokens.add(tokens)
        if steps > 0:  # An answer of two tokens that stood still says little of a token.
            self._token_s.add(decode_s / steps, beside, steps)
            self._steps += steps

    def unserved(self, waited_s: float) -> None:
        """A request was left by its reader before the first token, which took longer than that."""
        beside = max(1, self.running)
        if waited_s > self._first_s.at(beside):
            self._first_s.add(waited_s, beside)

    def output_tokens(self, demand: Demand) -> int:
        """How long each choice is likely to become."""
        if not self._output_tokens.count:
            return demand.max_tokens
        return min(demand.max_tokens, math.ceil(self._output_tokens.value))

    def work(self, demand: Demand) -> int:
        """How much a request is likely to be."""
        return demand.prompt_tokens + demand.choices * self.output_tokens(demand)

    def service_s(self, demand: Demand, beside: int) -> float:
        """How long a request is likely to take once it is dispatched, while so many run; 0 while
        unknown. The time of a token counts as far as it is known: a worker that begins stands still
        for seconds, and a reader may have left it after two tokens."""
        known = min(1.0, self._steps / REMEMBERED)
        decode_s = self.output_tokens(demand) * self._token_s.at(beside)
        return self._first_s.at(beside) + known * decode_s

    def surely_s(self, demand: Demand, beside: int) -> float:
        """An upper estimate: with what such estimates were off. As far as it is known: a few
        answers say little of those that follow, so their part grows to the whole of it."""
        known = min(1.0, self._off.count / REMEMBERED)
        return self.service_s(demand, beside) * (1 + 2 * known * self._off.value)

    def is_late_by_load(self, demand: Demand, left_s: float) -> bool:
        """Whether a request that would be late is so for what runs. Where nothing runs it is not.
        Where always as many ran, nobody knows, and it is taken to be: so few run until it shows."""
        if not self.running:
            return False
        return not self._token_s.has_slope or self.surely_s(demand, 1) <= left_s

    def wait_s(self, ahead: int) -> float | None:
        """How long the work `ahead` takes to drain; None while too little was measured."""
        if not ahead:
            return 0.0
        if not self._work or self._busy_s < MEASURED_S:
            return None
        return ahead * self._busy_s / self._work

    def needed_s(self, demand: Demand, wait_s: float) -> float:
        """What a request needs to be surely done that has to wait for `wait_s` or so."""
        return self.surely_s(demand, max(1, self.running)) + 2 * wait_s
