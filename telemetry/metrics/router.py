"""The metrics of a router process: requests, tokens, its queue and its workers."""

from __future__ import annotations

import time
from collections import Counter as Counted
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from telemetry.metrics.adapters import AdapterCounts
from telemetry.metrics.collectors import Labels, Row, Samples, Tally
from telemetry.metrics.endpoint import EndpointGauges, EndpointLoad
from telemetry.metrics.process import ProcessMetrics
from telemetry.metrics.table import AGAIN, LOSS_CAUSES, OVERLOADED, OWN_FAULTS
from telemetry.names import Metric

LEFT_SHOWN_S: Final = 3600.0
"""A worker that left is shown as down for this long."""


class WorkerUp(NamedTuple):
    """An attached worker."""

    worker_id: str
    role: str
    model: str


class RouterLoad(NamedTuple):
    """The present load of a router."""

    inflight_requests: int = 0
    queued_requests: int = 0
    queued_tokens: int = 0
    workers: Sequence[WorkerUp] = ()
    queue_drain_s: Mapping[str, float] = MappingProxyType({})
    """Seconds to empty the queue at the measured rate, by model. Models of unknown rate are left
    out."""
    running_batches: int = 0


class FastDoorLoad(Protocol):
    """The present load of the fast door (`router.doors.http2`)."""

    @property
    def connections(self) -> int:
        """Connections now."""
        ...

    @property
    def calls(self) -> int:
        """Calls under way."""
        ...

    @property
    def closed_by(self) -> Mapping[str, int]:
        """Connections that it has ended, by cause."""
        ...


class RouterMetrics(ProcessMetrics):
    """The metrics of a router process. Its methods count events."""

    def __init__(
        self, load: Callable[[], RouterLoad], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._requests = self._counter(Metric.REQUESTS)
        self._by_method = self._counter(Metric.REQUESTS_BY_METHOD)
        self._batch_lines = self._counter(Metric.BATCH_LINES)
        self._rejections = self._counter(Metric.REJECTIONS)
        self._prompt_tokens = self._counter(Metric.PROMPT_TOKENS)
        self._output_tokens: Counted[str] = Counted()
        self._retries = self._counter(Metric.RETRIES)
        self._failovers = self._counter(Metric.FAILOVERS)
        self._role_changes = self._counter(Metric.ROLE_CHANGES)
        self._local_prefills = self._counter(Metric.LOCAL_PREFILLS)
        self._forecast = self._histogram(Metric.FORECAST_RATIO)
        self._routed_cached = self._counter(Metric.ROUTED_CACHED_TOKENS)
        self._again = self._counter(Metric.COMPUTED_AGAIN)
        self._unread = self._counter(Metric.UNREAD_STREAMS)
        self._queue_wait = self._histogram(Metric.QUEUE_WAIT)
        self._first_token = self._histogram(Metric.TIME_TO_FIRST_TOKEN)
        self._per_token = self._histogram(Metric.TIME_PER_OUTPUT_TOKEN)
        self._inter_token = Tally(Metric.INTER_TOKEN)
        self.registry.register(self._inter_token)
        self.registry.register(Samples(Metric.OUTPUT_TOKENS, self._tokens_by_model))
        self._adapters = AdapterCounts(clock)
        self.registry.register(Samples(Metric.ADAPTER_REQUESTS, self._adapters.by_outcome))
        self.registry.register(Samples(Metric.ADAPTER_TOKENS, self._adapters.by_kind))
        self._duration = self._histogram(Metric.REQUEST_DURATION)
        self._workers_lost = self._counter(Metric.WORKERS_LOST)
        self._watch(load, _ROUTER_ROWS)
        self._workers_up = _WorkersUp(load, clock)
        self.registry.register(Samples(Metric.WORKER_UP, self._workers_up))
        self.registry.register(
            Samples(
                Metric.QUEUE_DRAIN,
                lambda: {(model,): wait_s for model, wait_s in load().queue_drain_s.items()},
            )
        )

        for reason in OVERLOADED:
            self._rejections.labels(reason)
        for reason in AGAIN:
            self._again.labels(reason)

    def watch_pages(self, load: Callable[[], Any]) -> None:
        """Shows what the router knows of pages; see `router.workers.holdings.PagesLoad`."""
        for metric, read in _PAGES_SAMPLES:
            self.registry.register(Samples(metric, partial(_of_pages, load, read)))

    def watch_endpoint(self, load: Callable[[], EndpointLoad]) -> None:
        """Shows what endpoint pickers read."""
        self.registry.register(EndpointGauges(load))

    def watch_fast_door(self, door: FastDoorLoad) -> None:
        """Shows the fast door's connections."""
        self._watch(lambda: door, _FAST_DOOR_ROWS)
        self.registry.register(Samples(Metric.FAST_CLOSED, lambda: _by_word(door.closed_by)))

    def watch_balance(self, ratios: Callable[[], Mapping[Labels, float]]) -> None:
        """Shows how busy the pools are; see `router.workers.balance.Balance.ratios`."""
        self.registry.register(Samples(Metric.BALANCE_RATIO, ratios))

    def worker_attached(self, role: str, model: str) -> None:
        """A worker joined. From now on the counters that alerts watch are shown, at 0, and the
        worker itself, also if it is gone before anybody looks.

        Prometheus sees no increase in a series that begins at 50.
        """
        self._workers_up()
        for cause in LOSS_CAUSES:
            self._workers_lost.labels(role, cause)
        for outcome in OWN_FAULTS:
            self._requests.labels(model, outcome)

    def worker_lost(self, role: str, cause: str) -> None:
        """A worker left without announcing it; `cause` is one of `LOSS_CAUSES`."""
        self._workers_lost.labels(role, cause).inc()

    def role_asked(self, role: str, cause: str) -> None:
        """A worker was asked to take a role; `cause` is "operator" or "balance"."""
        self._role_changes.labels(role, cause).inc()

    def rejected(self, reason: str) -> None:
        """A request was refused before any work; `reason` is one of the error table's."""
        self._rejections.labels(reason).inc()

    def waited(self, seconds: float) -> None:
        """A request left the queue for a worker."""
        self._queue_wait.observe(seconds)

    def retried(self, cause: str) -> None:
        """An attempt failed before the first token, and another began."""
        self._retries.labels(cause).inc()

    def failed_over(self, cause: str) -> None:
        """An attempt failed after the first token, and another goes on with the stream."""
        self._failovers.labels(cause).inc()

    def prefilled_locally(self, reason: str) -> None:
        """A decode worker computes an attempt's prompt; `reason` is a short stable word."""
        self._local_prefills.labels(reason).inc()

    def predicted(
        self, predicted_s: float, took_s: float, predicted_tokens: int, cached_tokens: int
    ) -> None:
        """A first token came, for which the router had foretold a time and cached tokens."""
        self._forecast.observe(took_s / max(predicted_s, 1e-4))
        self._routed_cached.labels("foretold").inc(predicted_tokens)
        self._routed_cached.labels("found").inc(cached_tokens)

    def computed_again(self, reason: str, pages: int) -> None:
        """A worker computed pages that another one holds; `reason` is one of `AGAIN`."""
        self._again.labels(reason).inc(pages)

    def unread(self) -> None:
        """Counts an answer that was given up after its deadline: its client did not read."""
        self._unread.inc()

    def first_token(
        self, model: str, seconds: float | None, prompt_tokens: int, trace_id: str = ""
    ) -> None:
        """A request's first token was sent, `seconds` after the request's arrival. None: that of a
        batch, which nobody waits for."""
        self._prompt_tokens.labels(model).inc(prompt_tokens)
        if seconds is not None:
            self._first_token.labels(model).observe(seconds, _exemplar(trace_id))

    def tokens(self, model: str, count: int, seconds_since_last: float | None) -> None:
        """A message of tokens was sent. `seconds_since_last` is None for a request's first one."""
        self._output_tokens[model] += count
        if seconds_since_last is not None:
            self._inter_token.of(model).add(seconds_since_last)

    def _tokens_by_model(self) -> Mapping[Labels, float]:
        return _by_word(self._output_tokens)

    def ended(
        self,
        model: str,
        outcome: str,
        duration_s: float | None,
        *,
        per_token_s: float | None = None,
        trace_id: str = "",
        method: str = "",
    ) -> None:
        """A request ended; `outcome` is "OK" or the reason of the error table. One of a batch has
        no duration."""
        error = "" if outcome == "OK" else outcome
        self._by_method.labels(method).inc()
        self._requests.labels(model, outcome).inc()
        if duration_s is not None:
            self._duration.labels(model, error).observe(duration_s, _exemplar(trace_id))
        if not error and per_token_s is not None:
            self._per_token.labels(model).observe(per_token_s, _exemplar(trace_id))

    def adapter_ended(self, adapter: str, went_well: bool) -> None:
        """A request with an adapter ended."""
        self._adapters.ended(adapter, went_well)

    def adapter_tokens(self, adapter: str, kind: str, count: int) -> None:
        """Tokens of such a request; `kind` is "prompt" or "output"."""
        self._adapters.tokens(adapter, kind, count)

    def batch_line(self, went_well: bool) -> None:
        """A line of a batch has its result."""
        self._batch_lines.labels("ok" if went_well else "failed").inc()


class _WorkersUp:
    """Lists attached workers, and those that left in the last hour.

    Older ones are dropped, so that names do not pile up. One with another role now has not left.
    """

    def __init__(self, load: Callable[[], RouterLoad], clock: Callable[[], float]) -> None:
        self._load = load
        self._clock = clock
        self._seen_s: dict[WorkerUp, float] = {}
        self._up: set[WorkerUp] = set()
        """At the last look: whoever is not attached any more has left since."""

    def __call__(self) -> dict[tuple[str, ...], float]:
        now_s, up = self._clock(), set(self._load().workers)
        known = self._seen_s | dict.fromkeys(up | self._up, now_s)
        self._up = up
        names = {one.worker_id for one in up}
        self._seen_s = {
            one: at_s
            for one, at_s in known.items()
            if now_s - at_s < LEFT_SHOWN_S and (one in up or one.worker_id not in names)
        }
        return {worker: float(worker in up) for worker in self._seen_s}


def _of_pages(
    load: Callable[[], Any], read: Callable[[Any], Mapping[Labels, float]]
) -> Mapping[Labels, float]:
    return read(load())


def _by_word(counts: Mapping[str, float]) -> Mapping[Labels, float]:
    return {(word,): count for word, count in counts.items()}


def _exemplar(trace_id: str) -> dict[str, str] | None:
    return {"trace_id": trace_id} if trace_id else None


_PAGES_SAMPLES: Final[Sequence[tuple[str, Callable[[Any], Mapping[Labels, float]]]]] = (
    (Metric.PAGE_EVENTS_BEHIND, lambda load: _by_word(load.behind)),
    (Metric.KNOWN_PAGES, attrgetter("keys")),
    (Metric.KNOWN_PAGES_DROPPED, lambda load: {(): load.forgotten}),
    (Metric.PAGE_MESSAGES_DROPPED, lambda load: _by_word(load.dropped)),
    (Metric.PAGES_ASKED_AGAIN, lambda load: _by_word(load.asked)),
)
_ROUTER_ROWS: Final = (
    Row(Metric.INFLIGHT, attrgetter("inflight_requests")),
    Row(Metric.BATCHES_RUNNING, attrgetter("running_batches")),
    Row(Metric.QUEUE_DEPTH, attrgetter("queued_requests")),
    Row(Metric.QUEUE_TOKENS, attrgetter("queued_tokens")),
)
_FAST_DOOR_ROWS: Final = (
    Row(Metric.FAST_CONNECTIONS, attrgetter("connections")),
    Row(Metric.FAST_CALLS, attrgetter("calls")),
)
