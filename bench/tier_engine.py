"""A whole engine with a host tier: first tokens, swap, and steps beside saves.

Part of `bench.kv_tiers`, which see.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.config import EngineConfig, LoadFormat
from engine.engine import Engine
from engine.loads import TierLoad
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequences import Sequence as Preempted
from engine.tiers.lanes import Copy
from engine.tiers.saving import BATCH_PAGES
from engine.types import (
    Event,
    NewTokens,
    Request,
    RequestFailed,
    SamplingParams,
    SequenceEnded,
    StopRules,
)

GIB = 1 << 30
SAVED_BYTES_PER_S = 4e9
ROWS = 64
ROW_TOKENS = 400
MOST_TOKENS = 16384
"""Of a sequence."""
LIMIT_S = 60.0
"""Nothing here takes longer; a request that hangs must not take the machine's time."""
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Client:
    """One request, and when its tokens came."""

    request: Request
    at_s: list[float] = field(default_factory=list)
    failed: str = ""
    begun: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def wait(self, event: threading.Event) -> None:
        """Waits for one of the two.

        Raises:
            RuntimeError: the request failed or hangs.
        """
        if not event.wait(LIMIT_S) or self.failed:
            raise RuntimeError(f"a request did not end: {self.failed or 'it hangs'}")


class Clients:
    """Makes requests of random tokens, no two alike."""

    def __init__(self, submit: Callable[..., None], vocab: int) -> None:
        self._submit, self._vocab = submit, vocab
        self._rng = np.random.default_rng(1)
        self._count = 0
        self._open: dict[bytes, Client] = {}

    def _sink(self, events: Sequence[Event]) -> None:
        """Takes the events of all requests, as a router's stream does."""
        for event in events:
            if isinstance(event, NewTokens):
                now = time.perf_counter()
                for request_id in event.request_ids:
                    client = self._open[request_id]
                    client.at_s.append(now)
                    if len(client.at_s) == 1:
                        client.begun.set()
            elif isinstance(event, SequenceEnded):
                self._open.pop(event.request_id).ended.set()
            elif isinstance(event, RequestFailed):
                client = self._open.pop(event.request_id)
                client.failed = str(event.reason)
                client.begun.set()
                client.ended.set()

    def prompt(self, tokens: int) -> np.ndarray:
        """Random tokens."""
        return self._rng.integers(0, self._vocab, tokens).astype(np.int32)

    def send(self, prompt: np.ndarray, max_tokens: int) -> Client:
        """Submits a request."""
        self._count += 1
        stop = StopRules(max_tokens, ignore_eos=True)
        client = Client(Request(self._count.to_bytes(16, "big"), prompt, GREEDY, stop))
        self._open[client.request.id] = client
        self._submit(client.request, self._sink)
        return client

    def run(self, prompt: np.ndarray, max_tokens: int = 1) -> float:
        """Runs a request. Returns its time to first token, seconds."""
        began = time.perf_counter()
        client = self.send(prompt, max_tokens)
        client.wait(client.ended)
        return client.at_s[0] - began


class Bench:
    """An engine, and what is done with it on its loop."""

    def __init__(self, config: EngineConfig) -> None:
        self._began = time.perf_counter()
        self._phase = ""
        self.built = Engine.build(config, self._progress)
        self.steps: list[float] = []
        """Seconds of the steps that had all rows."""
        self.built.start(lambda seconds, rows: self.steps.append(seconds) if rows >= ROWS else None)
        self.clients = Clients(self.built.submit, self.built.model.vocab_size)
        self.say("ready")

    def say(self, words: str) -> None:
        """Prints a line, at once: a run that is cut off has told what it knew."""
        print(f"{time.perf_counter() - self._began:6.1f} s  {words}", flush=True)

    def _progress(self, phase: str, done: int, total: int) -> None:
        if phase != self._phase:
            self._phase = phase
            self.say(phase)

    def on_loop(self, command: Callable[[Scheduler], None]) -> None:
        """Runs a command on the step loop's thread and waits for its end.

        Raises:
            RuntimeError: it failed, or the loop stands still.
        """
        done, errors = threading.Event(), list[Exception]()

        def run(scheduler: Scheduler) -> None:
            try:
                command(scheduler)
            except Exception as error:
                errors.append(error)
            finally:
                done.set()

        self.built._loop.post(run)
        if not done.wait(LIMIT_S):
            raise RuntimeError("the step loop stands still")
        if errors:
            raise RuntimeError("a command failed") from errors[0]

    def until(self, look: Callable[[Scheduler], bool]) -> None:
        """Looks on the loop until that is true.

        Raises:
            RuntimeError: it takes too long.
        """
        deadline, found = time.monotonic() + LIMIT_S, [False]

        def run(scheduler: Scheduler) -> None:
            found[0] = look(scheduler)

        while not found[0]:
            self.on_loop(run)
            if time.monotonic() > deadline:
                raise RuntimeError("it takes too long")
            time.sleep(0.001)

    def save_all(self) -> None:
        """Saves every cached page."""

        def save(scheduler: Scheduler) -> bool:
            blocks, most = scheduler.blocks, 8 * BATCH_PAGES
            saves = scheduler.tiers._saves  # type: ignore[attr-defined]
            if saves._lane.ahead_pages < most:
                saves._save(blocks.lend(most), held=False)
            idle = not scheduler.requests.by_id and not blocks.settling
            return idle and blocks.ready == blocks.available

        self.until(save)

    def evict_all(self) -> None:
        """Evicts every cached page. What is not saved is lost."""
        self.on_loop(_evict)

    def loaded_tokens(self) -> int:
        """Tokens that came from the host tier so far."""
        return self._tiers().loaded_tokens["host"]

    def load_rate(self) -> float:
        """Moving average of loads, bytes a second."""
        return self._tiers().bytes_per_s["load"]

    def _tiers(self) -> TierLoad:
        found = [TierLoad()]

        def look(scheduler: Scheduler) -> None:
            found[0] = scheduler.tiers.load() or found[0]

        self.on_loop(look)
        return found[0]


def _evict(scheduler: Scheduler) -> None:
    scheduler.blocks.release(scheduler.blocks.allocate_apart(scheduler.blocks.available))


def measure(model: str, host_gib: float, kv_gib: float, load_format: LoadFormat, runs: int) -> None:
    """Prints all figures."""
    bench = Bench(
        EngineConfig(
            model=model,
            load_format=load_format,
            kv_memory_bytes=int(kv_gib * GIB),
            kv_host_bytes=int(host_gib * GIB),
            max_sequences=ROWS + 1,
            max_context_tokens=MOST_TOKENS,
        )
    )
    try:
        for _ in range(2):
            bench.clients.run(bench.clients.prompt(_tokens(bench, 8000)))
        _from_host(bench, 8000, runs)
        _from_host(bench, 2000, runs)
        _swapped(bench, runs)
        _beside_saves(bench, runs)
    finally:
        bench.built.stop()


def _tokens(bench: Bench, wanted: int) -> int:
    return min(wanted, bench.built.model.max_context_tokens - 64)


def _from_host(bench: Bench, wanted: int, runs: int) -> None:
    """A prompt whose pages were evicted, beside the same whose pages are in the pool."""
    tokens = _tokens(bench, wanted)
    computed, cached, loaded = list[float](), list[float](), list[float]()
    before = bench.loaded_tokens()
    for _ in range(runs):
        prompt = bench.clients.prompt(tokens)
        computed.append(bench.clients.run(prompt))
        cached.append(bench.clients.run(prompt))
        bench.save_all()
        bench.evict_all()
        loaded.append(bench.clients.run(prompt))
    came = (bench.loaded_tokens() - before) / runs
    bench.say(
        f"{tokens} tokens, first token: computed {_ms(computed)} ms, from the pool"
        f" {_ms(cached)} ms, from the host tier {_ms(loaded)} ms; {came:.0f} tokens of each were"
        f" loaded, the last at {bench.load_rate() / 1e9:.1f} GB/s"
    )


def _ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} (most {1e3 * max(seconds):.1f})"


# -- swap -----------------------------------------------------------------------------------------


def _swapped(bench: Bench, runs: int) -> None:
    """A sequence is preempted and saved, others take its pages, and it comes back."""
    tokens = min(2000, bench.built.model.max_context_tokens // 2)
    gaps, same, before = [], 0, bench.loaded_tokens()
    for _ in range(runs):
        client = bench.clients.send(bench.clients.prompt(tokens), 200)
        client.wait(client.begun)
        kept = _bytes_of(bench, client, tokens)
        sequence = _swap_out(bench, client)
        gaps.append(_swap_in(bench, client, sequence))
        same += torch.equal(kept, _bytes_of(bench, client, tokens))
        client.wait(client.ended)
    came = (bench.loaded_tokens() - before) / runs
    bench.say(
        f"{tokens} tokens swapped in: {_ms(gaps)} ms to the next token; {came:.0f} tokens of each"
        f" were loaded; the same bytes came back in {same} of {runs} runs"
    )


def _bytes_of(bench: Bench, client: Client, tokens: int) -> torch.Tensor:
    """The full pages of a running request's prompt."""
    found: list[torch.Tensor] = []

    def copy(scheduler: Scheduler) -> None:
        sequence = scheduler.requests.by_id[client.request.id].sequences[0]
        pages = scheduler.batch.slots.pages(sequence.slot)[: tokens // scheduler.config.page_size]
        data = bench.built.pool.data
        found.append(data[torch.from_numpy(pages).to(data.device, torch.long)].cpu())

    bench.on_loop(copy)
    return found[0]


def _swap_out(bench: Bench, client: Client) -> Preempted:
    """Preempts the only request, and returns it once all its pages are in host slots alone. It
    stays out of the queue until the caller puts it there."""
    taken, out = [np.zeros(0, np.int32)], list[Preempted]()

    def strike(scheduler: Scheduler) -> None:
        scheduler.requests.preempt(scheduler.requests.by_id[client.request.id].sequences[0])
        take(scheduler)

    def take(scheduler: Scheduler) -> bool:
        """Others take what is free, so that it does not come back at once."""
        out.extend(scheduler.requests.preempted)
        scheduler.requests.preempted.clear()
        blocks = scheduler.blocks
        taken.append(blocks.allocate_apart(blocks.available))
        return bool(out) and not scheduler.tiers.leaving_pages and not blocks.settling

    bench.on_loop(strike)
    bench.until(take)
    bench.on_loop(lambda scheduler: scheduler.blocks.release(np.concatenate(taken)))
    return out[0]


def _swap_in(bench: Bench, client: Client, sequence: Preempted) -> float:
    """Puts it into the queue. Returns the seconds until its next token."""
    count, began = len(client.at_s), time.perf_counter()
    bench.on_loop(lambda scheduler: scheduler.requests.preempted.append(sequence))
    while len(client.at_s) == count:
        time.sleep(0.0005)
        if time.perf_counter() - began > LIMIT_S or client.failed:
            raise RuntimeError("a preempted request does not come back")
    return client.at_s[count] - began


# -- beside saves ---------------------------------------------------------------------------------


def _beside_saves(bench: Bench, runs: int) -> None:
    figures: dict[str, list[list[float]]] = {"alone": [], "saving": []}
    rates = []
    for _ in range(runs):
        for name, rate in (("alone", 0.0), ("saving", SAVED_BYTES_PER_S)):
            bench.evict_all()  # So that no other saves go on.
            prompts = [bench.clients.prompt(64) for _ in range(ROWS)]
            rows = [bench.clients.send(prompt, ROW_TOKENS) for prompt in prompts]
            for row in rows:
                row.wait(row.begun)
            bench.steps.clear()
            with _saving(bench, rate) as moved:
                began = time.perf_counter()
                for row in rows:
                    row.wait(row.ended)
                seconds = time.perf_counter() - began
            figures[name].append(sorted(bench.steps))
            rates += [moved[0] / seconds] if rate else []
    p50, p99 = {}, {}
    for name, measured in figures.items():
        p50[name] = statistics.median(run[len(run) // 2] for run in measured)
        p99[name] = statistics.median(run[int(0.99 * len(run))] for run in measured)
        words = f"step p50 {1e3 * p50[name]:.3f} ms, p99 {1e3 * p99[name]:.3f} ms"
        bench.say(f"{ROWS} rows, {name}: {words}, of {len(measured[0])} steps a run")
    bench.say(
        f"saving {statistics.median(rates) / 1e9:.2f} GB/s adds"
        f" {p50['saving'] / p50['alone'] - 1:+.2%} to p50 and"
        f" {1e3 * (p99['saving'] - p99['alone']):+.3f} ms to p99"
    )


@contextmanager
def _saving(bench: Bench, bytes_per_s: float) -> Iterator[list[int]]:
    """Copies pages to slots that nobody uses, at this rate and so many at a time as the tiers do.
    Yields a list of one: the bytes so far."""
    slots, moved = [np.zeros(0, np.int32)], [0]

    def take(scheduler: Scheduler) -> None:
        slots[0] = scheduler.tiers._host.allocate(BATCH_PAGES)  # type: ignore[attr-defined]

    def give_back(scheduler: Scheduler) -> None:
        scheduler.tiers._host.release(slots[0])  # type: ignore[attr-defined]

    bench.on_loop(take)
    over = threading.Event()

    def copy() -> None:
        tiers = bench.built._loop._scheduler.tiers
        batch = Copy(pages=np.arange(1, BATCH_PAGES + 1, dtype=np.int32), slots=slots[0])
        size = BATCH_PAGES * bench.built.pool.page_bytes
        due = time.perf_counter()
        while bytes_per_s and not over.wait(max(0.0, due - time.perf_counter())):
            tiers._lanes.saves.move(batch)  # type: ignore[attr-defined]
            moved[0] += size
            due += size / bytes_per_s

    thread = threading.Thread(target=copy)
    thread.start()
    try:
        yield moved
    finally:
        over.set()
        thread.join()
        bench.on_loop(give_back)
