"""Computes a run's figures: percentiles, service levels, and whether the client was fast enough.

Percentiles are interpolated between the two nearest values. Only complete requests count for
latencies; attainment counts all others as missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from console.loadgen.outcome import Outcome, SenderReport

BUSY_SHARE: Final = 0.9
"""A sender that used a larger share of a core was too busy to be on time."""
IDLE_SHARE: Final = 0.5
"""A sender that used less has waited for its core if it was late."""
LEAST_ALLOWED_LAG_MS: Final = 5.0
ALLOWED_LAG_SHARE: Final = 0.2
"""Share of the median time between tokens. A delay that is smaller hardly changes the figures."""
QUANTILES: Final = (50, 90, 95, 99)
"""Percentiles of the report and of its JSON."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of values, in their unit."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def percentiles(values: ArrayLike) -> Percentiles | None:
    """Returns the percentiles of values; None without a value."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return None
    at = np.percentile(array, (0, *QUANTILES, 100)).tolist()
    return Percentiles(array.size, float(array.mean()), *at)


@dataclass(frozen=True, slots=True)
class Slo:
    """Service levels of one request, milliseconds. None: no limit."""

    ttft_ms: float | None = None
    itl_p99_ms: float | None = None
    """Limit of the 99th percentile of the request's own gaps."""
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def given(self) -> dict[str, float]:
        """The limits that are set, by name."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: limit for name, limit in pairs if limit is not None}

    def kept_by(self, outcome: Outcome) -> bool:
        """Whether the request was complete and within every limit."""
        if not outcome.ok:
            return False
        times_s = outcome.times_s
        return all(
            1e3 * times_s[name.removesuffix("_ms")] <= limit for name, limit in self.given.items()
        )


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """Figures of the client itself."""

    senders: int
    lag_ms: Percentiles | None
    """Delay between a request's due time and its sending."""
    loop_lag_ms: Percentiles | None
    """Delay of event loops: time stamps of messages may be as late."""
    busiest_cpu_share: float
    """Share of a core that the busiest sender used."""
    allowed_lag_ms: float
    """A larger delay at p99 shows in the figures."""
    complaints: tuple[str, ...]
    """Reasons why the figures measure the client and not the server; none: they are valid."""

    @property
    def is_machine_busy(self) -> bool:
        """Whether the client is late though it has little to do: something else takes the cores."""
        return bool(self.complaints) and self.busiest_cpu_share < IDLE_SHARE


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Latencies are in ms and cover complete requests."""

    seed: int
    offered_rate: float
    """Planned requests a second; 0: one after another."""
    requests: int
    ok: int
    statuses: Mapping[str, int]
    wall_s: float
    """Seconds from the first request to the last message."""
    request_rate: float
    """Complete requests a second."""
    input_token_rate: float
    output_token_rate: float
    ttft_ms: Percentiles | None
    second_gap_ms: Percentiles | None
    """From the first message to the second. A hand-off lengthens this gap."""
    itl_ms: Percentiles | None
    """Between two messages of a request."""
    tpot_ms: Percentiles | None
    """Mean time of a request's tokens after the first."""
    e2e_ms: Percentiles | None
    tokens_per_message: float
    attainment: float | None
    """Share of all requests that kept the service levels; None where no level is set."""
    good_rate: float | None
    """Requests a second that kept the service levels."""
    simulated_ttft_ms: Percentiles | None
    """TTFT of one simulated server with a given service time, for the same arrivals."""
    client: ClientFigures


def summarize(
    reports: Sequence[SenderReport],
    seed: int,
    offered_rate: float,
    slo: Slo,
    max_lag_ms: float | None = None,
    simulated: Percentiles | None = None,
) -> Summary:
    """The figures of one run. The client may be `max_lag_ms` late; None: some part of the time
    between tokens."""
    outcomes = gathered(reports)
    good = [outcome for outcome in outcomes if outcome.ok]
    gaps = [outcome.gaps_s for outcome in good if len(outcome.arrivals_s) > 1]
    wall_s = _wall_s(outcomes)
    tokens = sum(outcome.tokens for outcome in good)
    kept = sum(map(slo.kept_by, outcomes)) if slo.given else None
    itl_ms = percentiles(1e3 * np.concatenate(gaps)) if gaps else None
    if max_lag_ms is None:
        part_ms = 0.0 if itl_ms is None else ALLOWED_LAG_SHARE * itl_ms.p50
        max_lag_ms = max(LEAST_ALLOWED_LAG_MS, part_ms)
    return Summary(
        seed=seed,
        offered_rate=offered_rate,
        requests=len(outcomes),
        ok=len(good),
        statuses=dict(Counter(outcome.status for outcome in outcomes).most_common()),
        wall_s=wall_s,
        request_rate=len(good) / wall_s,
        input_token_rate=sum(outcome.prompt_tokens for outcome in good) / wall_s,
        output_token_rate=tokens / wall_s,
        ttft_ms=_ms(outcome.ttft_s for outcome in good),
        second_gap_ms=_ms(gap[0] for gap in gaps),
        itl_ms=itl_ms,
        tpot_ms=_ms(o.tpot_s for o in good if o.tpot_s is not None),
        e2e_ms=_ms(outcome.e2e_s for outcome in good),
        tokens_per_message=tokens / max(1, sum(len(o.arrivals_s) for o in good)),
        attainment=None if kept is None else kept / len(outcomes),
        good_rate=None if kept is None else kept / wall_s,
        simulated_ttft_ms=simulated,
        client=_client_figures(reports, outcomes, max_lag_ms),
    )


def gathered(reports: Sequence[SenderReport]) -> list[Outcome]:
    """All requests of a run, in the order of due times."""
    outcomes = (outcome for report in reports for outcome in report.outcomes)
    return sorted(outcomes, key=lambda outcome: outcome.number)


def _wall_s(outcomes: Sequence[Outcome]) -> float:
    last_s = max((float(o.arrivals_s[-1]) for o in outcomes if len(o.arrivals_s)), default=0.0)
    return max(1e-9, last_s - min(outcome.sent_s for outcome in outcomes))


def _ms(seconds: Iterable[float]) -> Percentiles | None:
    return percentiles(1e3 * np.fromiter(seconds, dtype=np.float64))


def _client_figures(
    reports: Sequence[SenderReport], outcomes: Sequence[Outcome], max_lag_ms: float
) -> ClientFigures:
    lag = _ms(outcome.lag_s for outcome in outcomes)
    loop_lag = _ms(lag for report in reports for lag in report.loop_lags_s)
    shares = [report.cpu_s / report.wall_s for report in reports if report.wall_s > 0]
    busiest = max(shares, default=0.0)
    complaints = []
    if lag is not None and lag.p99 > max_lag_ms:
        complaints.append(f"1 % of the requests were sent {lag.p99:.1f} ms late or later")
    if loop_lag is not None and loop_lag.p99 > max_lag_ms:
        complaints.append(f"1 % of the messages were stamped {loop_lag.p99:.1f} ms late or later")
    if busiest > BUSY_SHARE:
        complaints.append(f"a sender was busy for {busiest:.0%} of the time")
    return ClientFigures(len(reports), lag, loop_lag, busiest, max_lag_ms, tuple(complaints))
