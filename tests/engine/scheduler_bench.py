"""A scheduler over a fake device, turned by hand as the step loop turns it."""

from __future__ import annotations

import math
import random

import numpy as np
from engine_fakes import (
    FIRST_STATE,
    VOCAB,
    DraftingExecutor,
    FakeLanes,
    HashExecutor,
    expected_output,
    folded,
    next_token,
)

from engine.adapters.registry import Adapters
from engine.bounds import Bounds
from engine.groups.others import other_groups
from engine.groups.spec import Kind, State, Window
from engine.pages.blocks import BlockManager
from engine.pages.eviction import EVICTION_POLICIES
from engine.pages.prefix import prompt_keys
from engine.pages.watch import Unwatched
from engine.sampling import Sampler
from engine.schedule.policies import POLICIES
from engine.schedule.scheduler import Scheduler
from engine.tiers.grouped import GroupedTiers
from engine.tiers.tiers import HostTiers
from engine.types import (
    ChunkComputed,
    EndReason,
    FailureReason,
    Mode,
    NewTokens,
    Prefilled,
    Request,
    RequestFailed,
    Reserved,
    SamplingParams,
    SequenceEnded,
    StopRules,
    TakenOver,
    TokenRecord,
)

GREEDY = SamplingParams(temperature=0.0)
GRID = 8
"""Tokens of a prompt that states take at once."""
SALT = b"\0"
"""Of a request without a salt, over a pool whose precision is not told."""


class Wiping(Unwatched):
    """A page that is free holds nothing: who still reads it finds that out."""

    def __init__(self, kv):
        self._kv = kv

    def freed(self, pages):
        self._kv[pages] = -1


class Bench:
    """A scheduler, a fake device and one step in flight, as in the step loop."""

    def __init__(
        self, *, num_pages=40, page_size=4, slots=6, step_tokens=16, seed=0, states=0, **options
    ):
        config = Bounds(
            cut_tokens=math.lcm(page_size, GRID) if states else 0,
            max_sequences=slots,
            max_step_tokens=step_tokens,
            mixed_prefill_tokens=options.pop("mixed", step_tokens),
            max_context_tokens=options.pop("context", 256),
            page_size=page_size,
            eos_token_ids=frozenset({3}),
            prefix_cache=options.pop("prefix_cache", True),
            page_watermark=options.pop("watermark", 0.9),
            full_step_tokens=options.pop("full", step_tokens),
            gathers=options.pop("gathers", False),
            max_adapters=options.pop("max_adapters", 0),
        )
        eviction = EVICTION_POLICIES[options.get("eviction", "lru")]()
        self.blocks = BlockManager(num_pages, eviction)
        policy = POLICIES[options.pop("policy", "fcfs")]()
        sampler = Sampler(slots, VOCAB, "cpu", [3])
        windows, widths = options.pop("windows", ()), options.pop("widths", None)
        grouped = bool(windows or states)
        self.device = (
            DraftingExecutor(num_pages, page_size, slots, random.Random(seed), windows)
            if widths
            else HashExecutor(num_pages, page_size, slots, grouped, windows, states)
        )
        managers = [
            BlockManager(len(kv), EVICTION_POLICIES[options.get("eviction", "lru")](), Wiping(kv))
            for kv in self.device.others
        ]
        kinds: list[Kind] = [Window(window) for window, _ in windows]
        kinds += [State(GRID)] * bool(states)
        others = other_groups(config, kinds, managers)
        self.tiers = self.lanes = self.host = None
        if host_slots := options.pop("host_slots", 0):
            lanes = [
                FakeLanes(kv, host_slots, options.get("lane_random"))
                for kv in (self.device.kv, *self.device.others)
            ]
            hosts = [BlockManager(host_slots, EVICTION_POLICIES["lru"]()) for _ in lanes]
            books = zip((self.blocks, *managers), hosts, lanes, strict=True)
            tiers = [HostTiers(*own, page_size) for own in books]
            self.host, self.lanes, self.tiers = hosts[0], lanes[0], tiers[0]
            if grouped:
                self.tiers = GroupedTiers(tiers[0], tiers[1:], others)
        self.adapters = Adapters(most_bytes=1 << 20)
        shared = {"others": others, "widths": widths, "adapters": self.adapters}
        self.scheduler = Scheduler(config, self.blocks, sampler, policy, self.tiers, **shared)
        self.previous = None
        self.random = random.Random(seed)
        self.requests: dict[bytes, Request] = {}
        self.outputs: dict[tuple[bytes, int], list[int]] = {}
        self.ends: dict[tuple[bytes, int], EndReason] = {}
        self.reserved: dict[bytes, Reserved] = {}
        self.taken_over: dict[bytes, TakenOver] = {}
        self.prefilled: dict[bytes, Prefilled] = {}
        self.chunks: dict[bytes, ChunkComputed] = {}
        self.failed: dict[bytes, FailureReason] = {}
        self.cancelled: set[bytes] = set()
        self.max_running = 0

    def sink(self, events):
        for event in events:
            match event:
                case NewTokens():
                    columns = (event.request_ids, event.choices, event.indices, event.token_ids)
                    for request_id, choice, index, token in zip(*columns, strict=True):
                        self.take(request_id, int(choice), int(index), int(token))
                case SequenceEnded():
                    assert (event.request_id, event.choice) not in self.ends
                    self.ends[event.request_id, event.choice] = event.reason
                case Reserved():
                    self.reserved[event.request_id] = event
                case TakenOver():
                    assert event.request_id not in self.reserved | self.taken_over
                    self.taken_over[event.request_id] = event
                case ChunkComputed():
                    self.chunks[event.request_id] = event
                case Prefilled():
                    self.prefilled[event.request_id] = event
                case RequestFailed():
                    self.failed[event.request_id] = event.reason
                    self.scheduler.requests.release(event.request_id)

    def take(self, request_id, choice, index, token):
        out = self.outputs.setdefault((request_id, choice), [])
        request = self.requests[request_id]
        given = len(request.generated[choice]) if request.generated else 0
        received = request.mode is Mode.RECEIVE and request_id not in self.taken_over
        first = given + received
        assert index == len(out) + first, "gap or duplicate"
        out.append(token)

    def submit(self, prompt, max_tokens=8, *, mode=Mode.WHOLE, choices=1, stop=(), **more):
        request_id = len(self.requests).to_bytes(16, "big")
        request = Request(
            request_id,
            np.array(prompt, np.int32),
            GREEDY,
            StopRules(max_tokens, token_ids=frozenset(stop)),
            mode,
            choices,
            **more,
        )
        self.requests[request_id] = request
        keys = prompt_keys(self.scheduler.config, request, request.prompt_ids)
        # All, none or some of them may be known before.
        known = keys[: len(self.requests) % 3 * len(keys) // 2]
        adapter = self.adapters.hold(request.adapter) if request.adapter else None
        self.scheduler.requests.submit(request, self.sink, known, adapter=adapter)
        return request_id

    def turn(self):
        scheduler = self.scheduler
        scheduler.admission.admit()
        plan = scheduler.planner.plan()
        launched = self.device.launch(plan) if plan else None
        if self.previous:
            before, result = self.previous
            if self.device.deferred is not None:
                self.device.finish()
                self.check_windows(before)
            try:
                outcome = result.result()
            except RuntimeError as error:
                scheduler.recovery.recover(before, error)
            else:
                scheduler.settler.settle(before, outcome)
        scheduler.requests.publish_delivered()
        self.previous = (plan, launched) if plan else None
        for sink, event in scheduler.requests.take_events():
            sink([event])
        scheduler.check_invariants()
        if self.host:
            self.host.check_invariants()
        self.max_running = max(self.max_running, scheduler.batch.slots.num_used)
        return self.previous is not None

    def check_windows(self, plan):
        """Every row that somebody waits for has seen the tokens of its windows, and no sequence
        holds more pages than its window and its chunks."""
        batch = self.scheduler.batch
        live = set(plan.sample_slots[batch.alive(plan)].tolist())
        live |= {chunk.task.leader.slot for chunk in batch.live_chunks(plan.number)}
        torn = {slot for number, slot in self.device.torn if number == plan.number}
        assert not torn & live, "a window lacks what it must have"
        config = self.scheduler.config
        groups = self.scheduler.others.groups[: len(self.device.windows)]
        for group, window in zip(groups, self.device.windows, strict=True):
            kept = Window(window).most_pages(config.page_size)
            chunks = 2 * -(-config.max_step_tokens // config.page_size)
            held = (group.end - group.first)[: config.max_sequences]
            assert int(np.maximum(held - kept, 0).sum()) <= chunks * batch.slots.num_used
            assert group.blocks.total - group.blocks.available - group.blocks.settling <= (
                kept * len(self.scheduler.requests.by_id) * 2 + chunks
            )

    def run(self, turns=2000):
        for _ in range(turns):
            requests = self.scheduler.requests
            if not self.turn() and not requests.waiting and not requests.preempted:
                return
        raise AssertionError("did not come to rest")

    def check_baseline(self):
        assert not self.scheduler.requests.by_id
        assert self.scheduler.batch.slots.num_used == 0
        if self.lanes:
            self.lanes._random = None
            self.scheduler.tiers.turn()
            while self.lanes.saves.queued:
                self.scheduler.tiers.turn()
            assert self.host.available == self.host.total, "a slot is still held"
        assert self.blocks.available == self.blocks.total
        for group in self.scheduler.others.groups:
            assert group.blocks.available == group.blocks.total

    def check_output(self, request_id):
        request = self.requests[request_id]
        stops = request.stop.token_ids | frozenset({3})
        for choice in range(request.choices):
            want = expected_output(request.prompt_ids.tolist(), request.stop.max_tokens, stops)
            assert self.outputs[request_id, choice] == want
            reason = self.ends[request_id, choice]
            if want[-1] == 3:
                assert reason is EndReason.END_OF_SEQUENCE
            elif want[-1] in request.stop.token_ids:
                assert reason is EndReason.STOP_TOKEN
            else:
                assert reason is EndReason.LENGTH


def prompt_of(rng: random.Random, length: int, shared: int = 0) -> list[int]:
    return [7] * shared + [rng.randrange(4, VOCAB) for _ in range(length - shared)]


def deliver(bench, request_id):
    """Plays the prefill worker: writes the prompt's KV into the pages that are not held."""
    request, grant = bench.requests[request_id], bench.reserved[request_id]
    prompt = request.prompt_ids.tolist()
    size = bench.device.page_size
    groups = [(0, grant.pages, grant.held_pages), *grant.others]
    for kv, (first_page, pages, held) in zip(
        [bench.device.kv, *bench.device.others], groups, strict=True
    ):
        if kv is bench.device.states:
            kv[pages] = len(prompt), folded(FIRST_STATE, 0, prompt)
            continue
        for i, page in enumerate(pages.tolist()):
            at = (first_page + i) * size
            part = prompt[at : at + size]
            if i >= held:
                kv[page, : len(part)] = part
            else:
                assert kv[page].tolist() == part, "held page has other tokens"
    first = next_token(prompt)
    bench.scheduler.requests.deliver(request_id, [TokenRecord(first)] * request.choices)
    return first
