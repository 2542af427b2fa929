"""The figures of `baton bench` on outcomes whose figures are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from console.loadgen.outcome import OK, SHORT, Outcome, SenderReport
from console.loadgen.report import goodput
from console.loadgen.report.queue_simulation import single_server_waits_s
from console.loadgen.report.summary import (
    ClientFigures,
    Percentiles,
    Slo,
    Summary,
    percentiles,
    summarize,
)


def outcome(number: int, sent_s: float, arrivals_s: list[float], **changes: object) -> Outcome:
    values: dict[str, object] = {
        "number": number,
        "due_s": sent_s,
        "sent_s": sent_s,
        "prompt_tokens": 100,
        "arrivals_s": np.array(arrivals_s),
        "ended_s": arrivals_s[-1] if arrivals_s else sent_s,
        "tokens": len(arrivals_s),
        "status": OK,
    }
    return Outcome(**{**values, **changes})


def summary_of(outcomes: list[Outcome], slo: Slo | None = None, **changes: object) -> Summary:
    report = SenderReport(outcomes, [0.0005] * 10, cpu_s=0.1, wall_s=1.0)
    for name, value in changes.items():
        setattr(report, name, value)
    return summarize([report], 1, 2.0, slo or Slo(), max_lag_ms=5.0)


def test_percentiles_of_known_values() -> None:
    found = percentiles(range(1, 102))
    assert found == Percentiles(101, 51.0, 1.0, 51.0, 91.0, 96.0, 100.0, 101.0)
    assert percentiles([5.0]) == Percentiles(1, *[5.0] * 7)
    assert percentiles([]) is None


def test_latencies_of_known_requests() -> None:
    found = summary_of(
        [
            outcome(0, 1.0, [1.1, 1.15, 1.16, 1.17]),
            outcome(1, 2.0, [2.3, 2.35, 2.45], tokens=5),
            outcome(2, 2.5, [], status="QUEUE_FULL"),
            outcome(3, 3.0, [3.1], status=SHORT),
        ]
    )
    assert (found.requests, found.ok) == (4, 2)
    assert found.statuses == {"OK": 2, "QUEUE_FULL": 1, "SHORT": 1}
    assert found.ttft_ms is not None
    assert (found.ttft_ms.min, found.ttft_ms.max) == pytest.approx((100, 300))
    assert found.ttft_ms.p50 == pytest.approx(200)
    assert found.second_gap_ms is not None
    assert found.second_gap_ms.mean == pytest.approx(50)
    assert found.itl_ms is not None
    assert (found.itl_ms.count, found.itl_ms.max) == (5, pytest.approx(100))
    assert found.tpot_ms is not None
    assert (found.tpot_ms.min, found.tpot_ms.max) == pytest.approx((70 / 3, 150 / 4))
    assert found.e2e_ms is not None
    assert (found.e2e_ms.min, found.e2e_ms.max) == pytest.approx((170, 450))
    assert found.wall_s == pytest.approx(2.1)  # from 1.0 to 3.1
    assert found.output_token_rate == pytest.approx(9 / 2.1)
    assert found.tokens_per_message == pytest.approx(9 / 7)
    assert found.attainment is None
    assert found.client.complaints == ()


def test_nothing_served_is_a_result_too() -> None:
    found = summary_of([outcome(0, 0.0, [], status="UNREACHABLE")], Slo(ttft_ms=1))
    assert (found.ok, found.attainment, found.ttft_ms) == (0, 0.0, None)


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(ttft_ms=150), [True, False, True, False]),
        (Slo(itl_p99_ms=60), [True, False, True, False]),
        (Slo(tpot_ms=25), [True, False, True, False]),
        (Slo(e2e_ms=300), [True, False, True, False]),
        (Slo(ttft_ms=1000, e2e_ms=1000), [True, True, True, False]),
    ],
)
def test_service_levels_are_judged_request_by_request(slo: Slo, kept: list[bool]) -> None:
    outcomes = [
        outcome(0, 1.0, [1.1, 1.15, 1.16, 1.17]),
        outcome(1, 2.0, [2.3, 2.35, 2.45]),
        outcome(2, 3.0, [3.01]),  # one message: no gap to miss anything with
        outcome(3, 3.0, [3.01, 3.02], status=SHORT),
    ]
    assert [slo.kept_by(one) for one in outcomes] == kept
    assert summary_of(outcomes, slo).attainment == sum(kept) / 4


def test_a_late_or_busy_client_is_named() -> None:
    good = [outcome(i, float(i), [i + 0.1]) for i in range(10)]
    late = [outcome(i, float(i), [i + 0.1], due_s=i - 0.05) for i in range(10)]
    assert "sent 50.0 ms late" in summary_of(late).client.complaints[0]
    assert "stamped 9.0 ms late" in summary_of(good, loop_lags_s=[0.009]).client.complaints[0]
    assert "busy for 95%" in summary_of(good, cpu_s=0.95).client.complaints[0]
    assert len(summary_of(late, loop_lags_s=[1.0], cpu_s=1.0).client.complaints) == 3


def test_a_client_may_be_late_by_a_part_of_the_time_between_tokens() -> None:
    """On a CPU with 70 ms between tokens, 12 ms hardly show."""
    slow = [outcome(i, float(i), [i + 0.1, i + 0.17, i + 0.24]) for i in range(10)]
    fast = [outcome(i, float(i), [i + 0.1, i + 0.11, i + 0.12]) for i in range(10)]

    def client_of(outcomes: list[Outcome], cpu_s: float = 0.02) -> ClientFigures:
        report = SenderReport(outcomes, [0.012] * 10, cpu_s=cpu_s, wall_s=1.0)
        return summarize([report], 1, 2.0, Slo()).client

    assert client_of(slow).allowed_lag_ms == pytest.approx(14)
    assert client_of(slow).complaints == ()
    assert client_of(fast).allowed_lag_ms == 5
    assert "stamped 12.0 ms late" in client_of(fast).complaints[0]
    assert client_of(fast).is_machine_busy
    assert not client_of(fast, cpu_s=0.6).is_machine_busy
    assert not client_of(slow).is_machine_busy


def test_a_queue_of_one_server() -> None:
    waits = single_server_waits_s([0.0, 0.5, 3.0, 3.1], [1.0, 1.0, 1.0, 0.5])
    assert waits == pytest.approx([1.0, 1.5, 1.0, 1.4])
    rng = np.random.default_rng(1)  # M/D/1 at load 0.5: the mean wait is half a service
    arrivals = np.cumsum(rng.exponential(2.0, 40_000)).tolist()
    assert np.mean(single_server_waits_s(arrivals, [1.0] * 40_000)) == pytest.approx(1.5, rel=0.05)


def probe_at(rate: float, capacity: float, e2e_s: float = 1.0) -> Summary:
    attainment = 1.0 if rate <= capacity else 0.2
    base = summary_of([outcome(0, 0.0, [0.1, e2e_s])])
    return Summary(
        **{name: getattr(base, name) for name in Summary.__slots__}
        | {"offered_rate": rate, "attainment": attainment}
    )


@pytest.mark.parametrize("capacity", [0.7, 3.0, 4.0, 61.0])
@pytest.mark.parametrize("first_rate", [1.0, 4.0, 50.0])
def test_bisection_finds_the_edge(capacity: float, first_rate: float) -> None:
    found = goodput.search(lambda rate: probe_at(rate, capacity), first_rate, 0.9, 0.02, 40)
    assert found.rate <= capacity <= (found.missed_rate or math.inf)
    assert found.missed_rate is not None
    assert found.missed_rate <= found.rate * 1.02
    assert len(found.probes) <= 14
    assert len({probe.offered_rate for probe in found.probes}) == len(found.probes)


def test_a_search_ends_where_idle_is_not_enough() -> None:
    found = goodput.search(lambda rate: probe_at(rate, 0.0, e2e_s=0.5), 8.0, 0.9, 0.05, 40)
    assert found.rate == 0
    assert found.by_rate()[0].offered_rate * 0.5 < goodput.IDLE


def test_a_search_ends_without_a_limit_or_out_of_probes() -> None:
    boundless = goodput.search(lambda rate: probe_at(rate, math.inf), 1.0, 0.9, 0.05, 40)
    assert (boundless.rate, boundless.missed_rate) == (goodput.RANGE, None)
    short = goodput.search(lambda rate: probe_at(rate, 5.0), 1.0, 0.9, 0.001, 3)
    assert (short.rate, len(short.probes)) == (4.0, 3)
