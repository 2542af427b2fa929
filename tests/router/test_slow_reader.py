"""A client that stops reading holds up nobody: the other readers of its router, timed in pairs."""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import suppress
from typing import Any

import grpc.aio
import numpy as np
import pytest
from scripted_worker import ScriptedWorker
from test_router_shutdown import Running, a_router_process

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from serving.wire import pack_ids

READERS = 7
STEP_S = 0.02
WIDE_TOKENS = 32
"""Of a step, for the reader that stops: with alternatives, its window is full within a moment."""
SETTLE_S = 0.6
BLOCK_S = 1.5
PAIRS = 12
MAX_RATIO = 1.05
"""Of the p99 time between tokens, stopped over reading; the median of all pairs."""


class Pump:
    """A worker that gives every attempt its tokens, step by step, in one message."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self._worker = worker
        self._next: dict[bytes, int] = {}
        self._wide = b""
        self._record = worker_pb2.TokenRecord(
            token_id=7,
            logprob=-1.0,
            top_ids=pack_ids(range(20)),
            top_logprobs=np.zeros(20, "<f4").tobytes(),
        )

    async def begin(self, *, wide: bool = False) -> None:
        attempt = (await self._worker.heard("submit")).attempt_id
        self._next[attempt] = 0
        if wide:
            self._wide = attempt

    def end_wide(self) -> None:
        self._next.pop(self._wide)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self._worker.say(tokens=self._step())

    def _step(self) -> worker_pb2.Tokens:
        rows = []
        for attempt, first in self._next.items():
            count = WIDE_TOKENS if attempt == self._wide else 1
            rows += [(attempt, index) for index in range(first, first + count)]
            self._next[attempt] = first + count
        scored = [row for row, (attempt, _) in enumerate(rows) if attempt == self._wide]
        return worker_pb2.Tokens(
            attempt_ids=[attempt for attempt, _ in rows],
            choice_indices=pack_ids([0] * len(rows)),
            indices=pack_ids([index for _, index in rows]),
            token_ids=pack_ids([7] * len(rows)),
            scored_rows=pack_ids(scored),
            records=[self._record] * len(scored),
        )


class Gaps:
    """Times between messages of all readers, while `kept` is set."""

    def __init__(self) -> None:
        self.kept: list[float] | None = None

    async def read(self, call: Any) -> None:
        last_s = 0.0
        while await call.read() is not grpc.aio.EOF:
            now_s = time.perf_counter()
            if self.kept is not None and last_s:
                self.kept.append(now_s - last_s)
            last_s = now_s


def request(*, wide: bool = False) -> api.StreamGenerateRequest:
    prompt = api.GenerationInput(token_ids=api.TokenIds(ids=[1, 2, 3]))
    prompt.output.CopyFrom(
        api.OutputOptions(omit_text=True, logprobs=wide, top_logprobs=20 if wide else 0)
    )
    return api.StreamGenerateRequest(input=prompt)


async def p99_beside(router: Running, pump: Pump, gaps: Gaps, *, reads: bool) -> float:
    """Of the other readers, beside one that reads or has stopped."""
    call = router.stub.StreamGenerate(request(wide=True))
    await pump.begin(wide=True)
    await call.read()
    reading = asyncio.create_task(Gaps().read(call) if reads else asyncio.sleep(0))
    await asyncio.sleep(SETTLE_S)
    gaps.kept = []
    await asyncio.sleep(BLOCK_S)
    found, gaps.kept = gaps.kept, None
    pump.end_wide()
    call.cancel()
    with suppress(asyncio.CancelledError):
        await reading
    assert len(found) > 5 * READERS, "the others were held up"
    return float(np.percentile(found, 99))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_reader_that_stops_does_not_move_the_others() -> None:
    gaps = Gaps()
    async with a_router_process(drain_s=0.0) as router:
        pump = Pump(router.worker)
        calls = [router.stub.StreamGenerate(request()) for _ in range(READERS)]
        for _ in calls:
            await pump.begin()
        tasks = [asyncio.create_task(pump.run())]
        tasks += [asyncio.create_task(gaps.read(call)) for call in calls]
        pairs = []
        for pair in range(PAIRS):
            both = {}
            for reads in (True, False) if pair % 2 else (False, True):
                both[reads] = await p99_beside(router, pump, gaps, reads=reads)
            pairs.append(both)
        for call in calls:
            call.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ratio = statistics.median(pair[False] / pair[True] for pair in pairs)
    stopped, reading = (statistics.median(pair[one] for pair in pairs) for one in (False, True))
    print(
        f"\np99 {reading * 1e3:.2f} ms, beside one that stopped {stopped * 1e3:.2f} ms: {ratio:.3f}"
    )
    assert ratio < MAX_RATIO
