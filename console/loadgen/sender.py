"""One sender process: writes its requests, sends each when it is due, stamps the answers.

Life:

1. Idle until a `RunOrder` comes. It writes every request, connects, warms up, and answers `Ready`,
   or `NotReady` if a warm-up request failed.
2. On `Start` it sends all requests. It sends `Progress` four times a second and `SenderReport` at
   the end. Then it is idle again.

The process ends when the other side closes the pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Final, NamedTuple

import numpy as np

from console.loadgen.endpoints import Asked, BenchEndpoint, EndpointError, Kept, Target
from console.loadgen.outcome import NO_TOKEN_IDS, OK, PROTOCOL, SHORT, Outcome, SenderReport
from console.loadgen.workload import WARM_UPS, Planned, prompt_ids
from serving.event_loop import loop_factory
from telemetry.metrics.loop_lag import EventLoopLag

PROGRESS_INTERVAL_S: Final = 0.25
"""A progress bar is smooth enough with four steps a second."""
LAG_INTERVAL_S: Final = 0.01
"""So often it is measured how late the event loop wakes: a sender's lag looks like a server's."""


class Sending(NamedTuple):
    """Properties that all runs of a benchmark share."""

    targets: tuple[Target, ...]
    """Requests go to them in turn; see `target_of`."""
    asked: Asked
    vocabulary: int
    """Drawn token ids are below it."""
    warm_ups: int
    """Number of warm-up requests of each sender to each target, as long as the first planned
    ones."""


class RunOrder(NamedTuple):
    """One plan's requests for one sender."""

    sending: Sending
    requests: tuple[Planned, ...]
    seed: int
    in_turn: bool
    """See `Plan.in_turn`."""
    senders: int
    """Number of senders that share the plan's requests."""


class Ready(NamedTuple):
    """All requests are written, and the connections are warm."""


class NotReady(NamedTuple):
    """A warm-up request failed."""

    status: str
    message: str


class Start(NamedTuple):
    """Makes a sender begin."""

    at_s: float
    """When to begin, by `time.perf_counter`, which all processes of a machine share."""


class Progress(NamedTuple):
    """Number of requests sent and ended so far."""

    sent: int
    ended: int


class _Sent(NamedTuple):
    request: Planned
    sent_s: float
    """By `time.perf_counter`, as is the next."""
    ended_s: float
    kept: Kept
    status: str
    prompt_tokens: int
    """All of them, with those of earlier turns."""


def main(connection: Connection) -> None:
    """Runs a sender process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The process that started it ends it.
    with asyncio.Runner(loop_factory=loop_factory()) as runner, _hung_up():
        while True:
            runner.run(_run_command(connection, connection.recv()))


def _hung_up() -> contextlib.suppress:
    """Suppresses the errors that say that the leading process is gone."""
    return contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError)


async def _run_command(connection: Connection, order: RunOrder) -> None:
    """Runs one order and sends its report."""
    endpoints = [connect(target, order.sending.asked) for target in order.sending.targets]
    try:
        load = _Load(order, endpoints)
        try:
            await load.warm_up()
        except EndpointError as error:
            connection.send(NotReady(error.status, error.message))
            return
        connection.send(Ready())
        start: Start = await asyncio.to_thread(connection.recv)
        with _no_garbage_collection():
            connection.send(await load.run(start.at_s, connection))
    finally:
        await asyncio.gather(*(endpoint.close() for endpoint in endpoints))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Stops the garbage collector: with thousands of kept messages it takes over a decode step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def target_of(number: int, senders: int, targets: int) -> int:
    """Returns the number of a request's target. Targets take turns; every sender uses every target.

    If the two counts have a common factor, plain turns would give a sender the same targets for
    ever. So the turns are shifted by one whenever the pattern would repeat.
    """
    rounds = number // math.lcm(senders, targets)
    return (number + rounds % math.gcd(senders, targets)) % targets


class _Load:
    """Runs one order."""

    def __init__(self, order: RunOrder, endpoints: Sequence[BenchEndpoint]) -> None:
        self._order = order
        self._endpoints = endpoints
        self._written = [
            b"" if request.turn and request.turn.number else self._write(request)
            for request in order.requests
        ]
        self._sent: list[_Sent] = []
        self._begun = 0

    def _at(self, request: Planned) -> BenchEndpoint:
        order = self._order
        return self._endpoints[target_of(request.number, order.senders, len(order.sending.targets))]

    def _write(self, request: Planned) -> bytes:
        return self._at(request).write(self._ids(request), request.output_tokens)

    def _ids(self, request: Planned) -> list[int]:
        drawn = prompt_ids(request, self._order.seed, self._order.sending.vocabulary)
        ids: list[int] = drawn.tolist()
        return ids

    async def warm_up(self) -> None:
        """Sends requests like the planned ones, one after another, to every endpoint."""
        own = self._order.requests[0].number if self._order.requests else 0
        likes = itertools.cycle(self._order.requests)
        for number, endpoint in itertools.product(
            range(self._order.sending.warm_ups), self._endpoints
        ):
            like = next(likes, None)
            if like is None:
                return
            new = like._replace(
                number=own * self._order.sending.warm_ups + number, blocks=(), turn=None
            )
            ids = prompt_ids(new, self._order.seed, self._order.sending.vocabulary, WARM_UPS)
            kept = Kept()
            await endpoint.send(endpoint.write(ids.tolist(), like.output_tokens), kept)
            if not endpoint.read(kept).whole:
                raise EndpointError(PROTOCOL, "the answer to a warm-up request was not whole")

    async def run(self, start_s: float, connection: Connection) -> SenderReport:
        """Sends all requests. Returns when the last answer has ended."""
        report = SenderReport()
        await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        reporting = asyncio.create_task(self._report_progress(connection))
        async with EventLoopLag(report.loop_lags_s.append, LAG_INTERVAL_S):
            await self._send_all(start_s)
        report.cpu_s = time.process_time() - cpu_s
        report.wall_s = time.perf_counter() - begun_s
        reporting.cancel()
        report.outcomes = [self._outcome(sent, start_s) for sent in self._sent]
        return report

    async def _send_all(self, start_s: float) -> None:
        if self._order.in_turn:
            await self._in_turn()
        elif any(request.turn for request in self._order.requests):
            await self._conversations(start_s)
        else:
            await self._open_loop(start_s)

    async def _conversations(self, start_s: float) -> None:
        """Each conversation begins when it is due, and then goes on by itself."""
        of: dict[int, list[tuple[Planned, bytes]]] = {}
        for request, written in zip(self._order.requests, self._written, strict=True):
            if request.turn:
                of.setdefault(request.turn.conversation, []).append((request, written))
        await asyncio.gather(*(self._converse(start_s, turns) for turns in of.values()))

    async def _converse(self, start_s: float, turns: Sequence[tuple[Planned, bytes]]) -> None:
        """Sends the turns of one conversation, each behind the answer before. It ends early when a
        turn fails, since nothing could follow."""
        ids: list[int] = []
        for request, written in turns:
            ids += self._ids(request)
            if request.turn and request.turn.number:
                await asyncio.sleep(request.turn.think_s)
                written = self._at(request).write(ids, request.output_tokens)
            else:
                await asyncio.sleep(max(0.0, start_s + request.due_s - time.perf_counter()))
            sent = await self._send(request, written, len(ids))
            reading = self._at(request).read(sent.kept)
            if sent.status != OK or not reading.whole:
                return
            if len(reading.token_ids) != reading.tokens:
                self._sent[self._sent.index(sent)] = sent._replace(status=NO_TOKEN_IDS)
                return
            ids += reading.token_ids

    async def _open_loop(self, start_s: float) -> None:
        tasks = []
        for request, written in zip(self._order.requests, self._written, strict=True):
            due_s = start_s + request.due_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            tasks.append(asyncio.create_task(self._send(request, written)))
        await asyncio.gather(*tasks)

    async def _in_turn(self) -> None:
        for request, written in zip(self._order.requests, self._written, strict=True):
            await self._send(request, written)

    async def _send(self, request: Planned, written: bytes, prompt_tokens: int = 0) -> _Sent:
        kept, status = Kept(), OK
        self._begun += 1
        sent_s = time.perf_counter()
        try:
            await self._at(request).send(written, kept)
        except EndpointError as error:
            status = error.status
        tokens = prompt_tokens or request.prompt_tokens
        sent = _Sent(request, sent_s, time.perf_counter(), kept, status, tokens)
        self._sent.append(sent)
        return sent

    async def _report_progress(self, connection: Connection) -> None:
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            connection.send(Progress(self._begun, len(self._sent)))

    def _outcome(self, sent: _Sent, start_s: float) -> Outcome:
        request, kept = sent.request, sent.kept
        reading = self._at(request).read(kept)
        status = sent.status
        if status == OK and not reading.whole:
            status = PROTOCOL
        forced = self._order.sending.asked.force_length
        if status == OK and forced and reading.tokens < request.output_tokens:
            status = SHORT
        sent_s = sent.sent_s - start_s
        follows = self._order.in_turn or bool(request.turn and request.turn.number)
        return Outcome(
            number=request.number,
            due_s=sent_s if follows else request.due_s,
            sent_s=sent_s,
            prompt_tokens=sent.prompt_tokens,
            arrivals_s=np.array(reading.arrivals_s) - start_s,
            ended_s=sent.ended_s - start_s,
            tokens=reading.tokens,
            status=status,
            trace_id=reading.trace_id,
            cached_tokens=reading.cached_tokens,
            loaded_tokens=dict(reading.loaded_tokens),
            turn=request.turn.number if request.turn else -1,
        )


def connect(target: Target, asked: Asked) -> BenchEndpoint:
    """Makes an endpoint. It sends nothing yet."""
    if target.protocol == "grpc":
        from console.loadgen.grpc_endpoint import GrpcEndpoint

        return GrpcEndpoint(target.address, asked)
    from console.loadgen.openai_endpoint import OpenAiEndpoint

    return OpenAiEndpoint(target.address, asked)
