"""Workers without gRPC, and both ends of a Work stream's outbox.

Everything is real but the model: its device hashes the tokens that a sequence's KV pages hold, and
those pages are what the transport moves. So a page that is reused too early, or never written,
changes the output.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from engine_fakes import VOCAB, HashExecutor, expected_output
from waiting import WAIT_S, until

from baton.worker.v1 import worker_pb2
from decode_service.service import DecodeService
from engine.bounds import Bounds
from engine.engine import Engine
from engine.groups.others import other_groups
from engine.groups.spec import Window
from engine.loop.step_loop import StepLoop
from engine.pages.blocks import BlockManager
from engine.pages.eviction import EVICTION_POLICIES
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.step.plan import StepPlan, StepResult
from engine.types import ModelInfo
from fetch_service.fetching import FetchService
from fetch_service.holding import HoldService
from kv_transfer.events import TransferEvent
from kv_transfer.thread import TransferThread
from kv_transfer.transports.loopback import LoopbackTransport
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import PageGroup
from prefill_service.pooling import PoolService
from prefill_service.service import PrefillService
from serving.wire import pack_ids
from telemetry.metrics.worker import WorkerMetrics
from worker.peers import PeerPaths
from worker.quiesce import QuiesceRelay
from worker.stream import Services
from worker_base.messages import endpoint_message, model_message, unpack_ids
from worker_base.outbox import LoopInbox, Outbox
from worker_base.page_layout import PageLayout
from worker_base.page_reports import PageReports

PAGE_TOKENS = 4
PAGE_BYTES = 8 * PAGE_TOKENS
STEP_TOKENS = 16
PREFILL = worker_pb2.WORK_MODE_PREFILL
DECODE = worker_pb2.WORK_MODE_DECODE
WHOLE = worker_pb2.WORK_MODE_WHOLE
Windows = Sequence[tuple[int, int]]
"""Tokens and pages of each group beyond the first."""
_serial = itertools.count()


class GatedExecutor(HashExecutor):
    """Runs steps at once, or while it holds only when told to."""

    def __init__(self, num_pages: int, max_slots: int, windows: Windows = ()) -> None:
        super().__init__(num_pages, PAGE_TOKENS, max_slots, deferred=True, windows=windows)
        counts = [num_pages, *(pages for _, pages in windows)]
        self.pool = torch.full((sum(counts), PAGE_TOKENS), -1, dtype=torch.int64)
        self.kv, *self.others = np.split(self.pool.numpy(), np.cumsum(counts)[:-1])
        firsts = [sum(counts[:group]) for group in range(len(counts))]
        self.groups = [
            PageGroup(PAGE_BYTES, count, offset=first * PAGE_BYTES)
            for count, first in zip(counts, firsts, strict=True)
        ]
        self.holds = False
        self.differs_by_choice = False
        """Choices get different first tokens: one more than the choice before."""
        self._lock = threading.Lock()

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        with self._lock:
            future = super().launch(plan)
            if not self.holds:
                self._run_deferred()
        return future

    def step(self) -> None:
        """Runs the oldest step that is held."""
        with self._lock:
            self.finish()

    def let_go(self) -> None:
        """Runs what is held, and holds no more."""
        with self._lock:
            self.holds = False
            self._run_deferred()

    @property
    def held(self) -> int:
        """Steps launched and not run."""
        return len(self.deferred or ())

    def _run(self, plan: StepPlan) -> StepResult:
        result = super()._run(plan)
        torn = [slot for number, slot in self.torn if number == plan.number]
        result.tokens[np.isin(plan.sample_slots, torn)] = -1
        if self.differs_by_choice:
            where = plan.sample_tokens.tolist()
            choices = [where[:index].count(at) for index, at in enumerate(where)]
            result.tokens[:] = (result.tokens + choices) % VOCAB
        return result

    def _run_deferred(self) -> None:
        while self.deferred:
            self.finish()


class PausableInbox(LoopInbox):
    """What other threads say can be kept from the event loop for a while."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self._kept: list[Callable[[], None]] | None = None

    def put(self, action: Callable[[], None]) -> None:
        super().put(partial(self._pass_on, action))

    def pause(self) -> None:
        self._kept = []

    def resume(self) -> None:
        kept, self._kept = self._kept, None
        for action in kept or ():
            action()

    @property
    def kept(self) -> int:
        return len(self._kept or ())

    def _pass_on(self, action: Callable[[], None]) -> None:
        if self._kept is None:
            action()
        else:
            self._kept.append(action)


class Node:
    """One worker: engine, transfer thread, both services."""

    def __init__(
        self,
        name: str,
        *,
        num_pages: int = 41,
        max_sequences: int = 4,
        grant_wait_s: float = 30.0,
        grant_timeout_s: float = 60.0,
        max_bytes_per_peer: int = 1 << 30,
        fingerprint: str = "same",
        least_fetch_s: float = 60.0,
        windows: Windows = (),
    ) -> None:
        serial = next(_serial)
        self.name = f"{name}-{serial}"
        self.epoch = 1000 + serial
        self.model = ModelInfo("hash", "", "r", fingerprint, 256, VOCAB, (), PAGE_TOKENS)
        self.executor = GatedExecutor(num_pages, max_sequences, windows)
        self.scheduler = _scheduler(num_pages, max_sequences, windows)
        groups = tuple(self.executor.groups)
        layout = PageLayout(PAGE_TOKENS, groups, (None, *(window for window, _ in windows)))
        self.engine = Engine(
            self.model,
            SimpleNamespace(first=SimpleNamespace(device=torch.device("cpu"))),
            StepLoop(self.scheduler, self.executor),
        )
        self.inbox = PausableInbox()
        self.transfer = TransferThread(self._make_transport, self.epoch, self._on_transfer)
        self.identity = worker_pb2.WorkerIdentity(
            worker_id=name, epoch=self.epoch, model=model_message(self.model)
        )
        self.metrics = WorkerMetrics(self.engine.load, lambda: self.transfer.counters)
        self.transport: LoopbackTransport
        self.peers = PeerPaths(self.identity, self.transfer)
        self.prefill = PrefillService(
            self.engine,
            self.transfer,
            self.inbox,
            self.metrics,
            layout=layout,
            path_to=self.peers.path_to,
            grant_wait_s=grant_wait_s,
        )
        self.decode = DecodeService(
            self.engine,
            self.transfer,
            self.inbox.call_on_loop,
            self.metrics,
            epoch=self.epoch,
            agent_name=self.name,
            layout=layout,
            max_bytes_per_peer=max_bytes_per_peer,
            grant_timeout_s=grant_timeout_s,
        )
        self.send_to_routers: Callable[[worker_pb2.WorkResponse], None] = lambda said: None
        """Set by whoever puts the node behind a server."""
        self.relay = QuiesceRelay(
            self.transfer, self.name, self.epoch, lambda said: self.send_to_routers(said)
        )
        self.pages = PageReports(lambda _tell: None)
        self.fetching = FetchService(
            self.engine.fetching,
            self.transfer,
            self.inbox.call_on_loop,
            self.metrics,
            self.peers,
            epoch=self.epoch,
            agent_name=self.name,
            layout=layout,
            leg_of=lambda one: self.prefill.leg(one) or self.decode.leg(one),
            least_s=least_fetch_s,
        )
        self.holding = HoldService(
            self.engine.fetching,
            self.transfer,
            self.inbox.call_on_loop,
            self.metrics,
            self.peers,
            layout=layout,
        )
        self.services = Services(
            self.prefill,
            self.decode,
            PoolService(self.engine, self.inbox),
            self.peers,
            self.relay,
            self.fetching,
            self.holding,
            self.pages,
        )
        endpoint = self.transfer.start()
        self.identity.endpoint.CopyFrom(endpoint_message(endpoint))
        self.engine.start(self.metrics.stepped)

    @property
    def free_pages(self) -> int:
        load = self.engine.load()
        return load.free_pages + load.evictable_pages

    @property
    def held_pages(self) -> int:
        """Pages on their way in pushes that the transport holds."""
        return sum(len(push.source) for push in list(self.transport._pushes.values()))

    @property
    def all_pages(self) -> int:
        return self.engine.load().total_pages

    @property
    def has_measured_peers(self) -> bool:
        """Self-tests are over: from now on every push is a transfer's. On a busy machine they go on
        after a path is open, and between two of them there is no push."""
        return all(peer.gigabytes_per_s for peer in self.peers.health())

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way, and every page is back."""
        load, counters = self.engine.load(), self.transfer.counters
        return (
            not self.prefill.stats.active
            and not self.decode.stats.active
            and not self.decode.stats.quarantined
            and not self.prefill._by_transfer
            and not self.decode._by_transfer
            and not self.fetching.active
            and not self.holding.active
            and self.free_pages == load.total_pages
            and all(one.free_pages + one.evictable_pages == one.total_pages for one in load.groups)
            and load.running_sequences == load.waiting_requests == 0
            and counters.sends_in_progress == counters.quarantined_transfers == 0
        )

    async def close(self) -> None:
        self.executor.let_go()
        self.transport.holds = False
        await asyncio.to_thread(self.transfer.stop, 5.0)
        await asyncio.to_thread(self.engine.stop)
        self.scheduler.check_invariants()

    def _make_transport(self) -> LoopbackTransport:
        memory = PoolMemory.of(self.executor.pool, self.executor.groups)
        self.transport = LoopbackTransport(self.name, memory)
        return self.transport

    def _on_transfer(self, event: TransferEvent) -> None:
        self.inbox.call_on_loop(partial(self._dispatch, event))

    def _dispatch(self, event: TransferEvent) -> None:
        self.peers.on_transfer(event)
        self.prefill.on_transfer(event)
        self.decode.on_transfer(event)
        self.relay.on_transfer(event)
        self.fetching.on_transfer(event)
        self.holding.on_transfer(event)


class Ear:
    """A router's end of a stream: what it was told, in order."""

    def __init__(self) -> None:
        self.overflowed = False
        self.outbox = Outbox(self._overflow)
        self.history: list[tuple[str, Any]] = []
        self.tokens: dict[tuple[bytes, int], list[int]] = defaultdict(list)
        """By attempt and choice, merged by index."""
        self._arrived = asyncio.Condition()
        self._task = asyncio.create_task(self._listen())

    def all(self, kind: str, attempt_id: bytes | None = None) -> list[Any]:
        """Messages of that kind so far."""
        return [
            message
            for name, message in self.history
            if name == kind and attempt_id in (None, message.attempt_id)
        ]

    def kinds(self, attempt_id: bytes) -> list[str]:
        """Kinds of messages about one attempt, tokens left out."""
        return [
            kind
            for kind, message in self.history
            if kind not in ("tokens", "load") and message.attempt_id == attempt_id
        ]

    async def heard(self, kind: str, attempt_id: bytes | None = None) -> Any:
        """The first such message, as soon as it is there."""
        async with asyncio.timeout(WAIT_S), self._arrived:
            await self._arrived.wait_for(lambda: self.all(kind, attempt_id))
        return self.all(kind, attempt_id)[0]

    def close(self) -> None:
        self._task.cancel()

    def _overflow(self) -> None:
        self.overflowed = True

    async def _listen(self) -> None:
        while (message := await self.outbox.get()) is not None:
            async with self._arrived:
                kind = message.WhichOneof("message")
                assert kind is not None
                content = getattr(message, kind)
                self.history.append((kind, content))
                if kind == "tokens":
                    self._merge(content)
                if kind == "first_token":
                    self._merge_first(content)
                self._arrived.notify_all()

    def _merge(self, tokens: worker_pb2.Tokens) -> None:
        packed = tokens.choice_indices, tokens.indices, tokens.token_ids
        columns = (unpack_ids(column).tolist() for column in packed)
        for attempt_id, choice, index, token in zip(tokens.attempt_ids, *columns, strict=True):
            known = self.tokens[attempt_id, choice]
            assert index <= len(known), "a gap"
            if index < len(known):
                assert known[index] == token
            else:
                known.append(token)

    def _merge_first(self, first: worker_pb2.FirstToken) -> None:
        for choice, record in enumerate(first.records):
            known = self.tokens[first.attempt_id, choice]
            assert not known or known[0] == record.token_id
            if not known:
                known.append(record.token_id)


class Pair:
    """A prefill and a decode worker, and a router that hears each."""

    def __init__(self, prefill: Node, decode: Node) -> None:
        self.p, self.d = prefill, decode
        self.from_p, self.from_d = Ear(), Ear()

    async def meet(self) -> None:
        self.p.peers.meet(self.d.identity, self.from_p.outbox)
        self.d.peers.meet(self.p.identity, self.from_d.outbox)
        await until(lambda: self.p.peers.path_to(self.d.name) and self.d.peers.path_to(self.p.name))
        await until(lambda: self.p.has_measured_peers and self.d.has_measured_peers)

    def submit(self, attempt: Attempted) -> Attempted:
        """To both."""
        self.submit_decode(attempt)
        self.submit_prefill(attempt)
        return attempt

    async def begin(self, attempt: Attempted) -> Attempted:
        """Submits it to both, and forwards the grant."""
        self.submit(attempt)
        await self.forward_grant(attempt)
        return attempt

    def submit_prefill(self, attempt: Attempted) -> None:
        self.p.prefill.submit(attempt.message(PREFILL, self.d.name), self.from_p.outbox)

    def submit_decode(self, attempt: Attempted) -> None:
        self.d.decode.submit(attempt.message(DECODE, self.p.name), self.from_d.outbox)

    async def forward_grant(self, attempt: Attempted) -> worker_pb2.Grant:
        grant = await self.from_d.heard("granted", attempt.id)
        self.p.prefill.grant(grant, self.from_p.outbox)
        return grant

    async def run(self, attempt: Attempted) -> None:
        """Submits, forwards the grant and waits for the end."""
        await self.begin(attempt)
        for _ in range(attempt.choices):
            await self.from_d.heard("finished", attempt.id)
        await until(lambda: len(self.from_d.all("finished", attempt.id)) == attempt.choices)
        await self.from_p.heard("prefill_done", attempt.id)

    async def quiet(self) -> None:
        """Waits until nothing is left anywhere."""
        await until(lambda: self.p.is_quiet and self.d.is_quiet)


class Attempted:
    """An attempt, as a router makes it."""

    def __init__(
        self,
        prompt_tokens: int = 10,
        *,
        max_tokens: int = 6,
        choices: int = 1,
        stops: frozenset[int] = frozenset(),
        deadline_unix_ns: int = 0,
        time_left_ms: int | None = None,
        seed: int | None = None,
        traceparent: str = "",
        takeover_tokens: int = 0,
        prompt: Sequence[int] = (),
        salt: bytes = b"",
        fetch: tuple[str, int] = ("", 0),
    ) -> None:
        rng = np.random.default_rng(seed if seed is not None else next(_serial))
        self.id = secrets.token_bytes(16)
        self.prompt = list(prompt) or rng.integers(0, VOCAB, prompt_tokens).tolist()
        self.salt = salt
        self.fetch = fetch
        """Agent name of the holder, and pages that it is said to hold."""
        self.max_tokens = max_tokens
        self.choices = choices
        self.stops = stops
        self.deadline_unix_ns = deadline_unix_ns
        self.time_left_ms = time_left_ms
        self.traceparent = traceparent
        self.takeover_tokens = takeover_tokens
        self.abort_asked: Ear | None = None

    @property
    def expected(self) -> list[int]:
        return expected_output(self.prompt, self.max_tokens, self.stops)

    @property
    def num_pages(self) -> int:
        return -(-len(self.prompt) // PAGE_TOKENS)

    def stop_with_first(self) -> Attempted:
        """Makes its first token a stop token."""
        self.stops = frozenset(self.expected[:1])
        return self

    def message(
        self, mode: worker_pb2.WorkMode.ValueType, peer_agent_name: str = ""
    ) -> worker_pb2.Submit:
        return worker_pb2.Submit(
            attempt_id=self.id,
            mode=mode,
            prompt_ids=pack_ids(self.prompt),
            sampling=worker_pb2.Sampling(top_p=1, repetition_penalty=1),
            stopping=worker_pb2.Stopping(
                max_tokens=self.max_tokens, token_ids=sorted(self.stops), ignore_eos=True
            ),
            choices=self.choices,
            peer_agent_name=peer_agent_name,
            deadline_unix_ns=self.deadline_unix_ns,
            time_left_ms=self.time_left_ms,
            traceparent=self.traceparent,
            takeover_tokens=self.takeover_tokens,
            cache_salt=self.salt,
            fetch=worker_pb2.PeerFetch(agent_name=self.fetch[0], pages=self.fetch[1]),
        )


@asynccontextmanager
async def a_pair(**options: Any) -> AsyncIterator[Pair]:
    """Two workers that have met. `options` go to both, or with `p_` and `d_` in front to one."""
    shared = {key: value for key, value in options.items() if key[:2] not in ("p_", "d_")}
    nodes = [
        Node(name, **shared, **{k[2:]: v for k, v in options.items() if k.startswith(prefix)})
        for name, prefix in (("prefill", "p_"), ("decode", "d_"))
    ]
    pair = Pair(*nodes)
    try:
        await pair.meet()
        yield pair
    finally:
        pair.from_p.close()
        pair.from_d.close()
        for node in nodes:
            await node.close()


def _scheduler(num_pages: int, max_sequences: int, windows: Windows) -> Scheduler:
    config = Bounds(
        max_sequences=max_sequences,
        max_step_tokens=STEP_TOKENS,
        mixed_prefill_tokens=STEP_TOKENS,
        max_context_tokens=256,
        page_size=PAGE_TOKENS,
        eos_token_ids=frozenset(),
    )
    sampler = Sampler(max_sequences, VOCAB, "cpu", ())
    first, *managers = (
        BlockManager(count, EVICTION_POLICIES["lru"]())
        for count in (num_pages, *(pages for _, pages in windows))
    )
    others = other_groups(config, [Window(window) for window, _ in windows], managers)
    return Scheduler(config, first, sampler, others=others)
