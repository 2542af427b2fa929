"""Which tier finds the blocks of a trace, and what an ideal cache of the same size would find.

python -m bench.kv_trace [--pages 400] [--host 1600] [--disk 8000] [--policy lru] [FILE.jsonl]
python -m bench.kv_trace --ready 16 8 4 2       # one part in so many of the pool is kept ready
python -m bench.kv_trace --chats --ready 16 4   # conversations that are drawn, not a trace

A trace in the form of Mooncake's (FAST'25), one request a line; the head of its conversation trace
comes with Baton. A block of 512 tokens is one page. Nothing is computed: the step loop, the
scheduler, the tiers and a disk store run as in a worker, over pages of 4 KiB. Requests come one
after the other.

The ideal cache holds as many blocks as all tiers together, none twice, and loses none before it is
full. It evicts the least recently used, the end of a prompt first.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
import torch

from engine.bounds import Bounds
from engine.loop.step_loop import StepLoop
from engine.pages.blocks import BlockManager
from engine.pages.eviction import EVICTION_POLICIES
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.step.executor import NullExecutor
from engine.tiers import fetching, saving
from engine.tiers.build import StoreConfig, build_tiers
from engine.types import Event, Request, RequestFailed, SamplingParams, SequenceEnded, StopRules

BLOCK, PAGE_BYTES = 512, 4096
QUIET_LOOKS = 3
OBJECT_BYTES = 2 * PAGE_BYTES
"""A header and one page."""


def trace(path: str) -> list[list[int]]:
    """The blocks of each request's prompt."""
    head = files("console.loadgen") / "traces" / "mooncake_conversation_head.jsonl.gz"
    data = Path(path).read_bytes() if path else head.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    return [json.loads(line)["hash_ids"] for line in text.splitlines()]


def chats(conversations: int = 120, turns: int = 8, seed: int = 1) -> list[list[int]]:
    """Blocks of prompts of conversations that take turns at random. A turn adds a number of blocks
    that is log-normal around 2 (1,024 tokens, as where documents are sent). All begin with the same
    4 blocks."""
    draw = np.random.default_rng(seed)
    order = draw.permutation(np.repeat(np.arange(conversations), turns))
    so_far = [list(range(4)) for _ in range(conversations)]
    next_block, prompts = 4, []
    for one in order:
        count = int(np.ceil(draw.lognormal(np.log(2), 1)))
        so_far[one] += range(next_block, next_block + count)
        next_block += count
        prompts.append(list(so_far[one]))
    return prompts


def ideal(prompts: Sequence[Sequence[int]], size: int) -> int:
    """Blocks that a cache of `size` blocks finds. The last of a prompt is computed in any case."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for blocks in prompts:
        missing = [block not in cache for block in blocks[:-1]]
        hits += missing.index(True) if True in missing else len(missing)
        for block in reversed(blocks):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > size:
            cache.popitem(last=False)
    return hits


class Replay:
    """An engine without a model over as many pages, slots and objects."""

    def __init__(self, pages: int, slots: int, objects: int, policy: str, folder: str) -> None:
        bounds = Bounds(
            max_sequences=4,
            max_step_tokens=1 << 20,
            max_context_tokens=1 << 20,
            page_size=BLOCK,
            page_watermark=1.0,
        )
        blocks = BlockManager(pages + 1, EVICTION_POLICIES[policy]())
        pool = torch.zeros((pages + 1, PAGE_BYTES), dtype=torch.uint8)
        gib = (objects * OBJECT_BYTES + 1) / (1 << 30)
        stores = StoreConfig((f"disk:{folder}?gib={gib}",) if objects else (), "", "trace")
        size = (slots + 1) * PAGE_BYTES if slots else 0
        tiers = build_tiers(size, pool, blocks, policy, BLOCK, stores)
        sampler = Sampler(4, 1 << 20, "cpu", [])
        self.scheduler = Scheduler(bounds, blocks, sampler, tiers=tiers)
        self.loop = StepLoop(self.scheduler, NullExecutor())
        # Nothing is computed, so that no rate says what is sooner.
        self.scheduler.tiers.note_rate = lambda tokens_per_s: None  # type: ignore[method-assign]
        self._done = threading.Event()
        self._count = 0

    def run(self, prompts: Sequence[Sequence[int]]) -> None:
        """Runs the requests, each when the one before has ended and its pages are where they go."""
        self.loop.start()
        for blocks in prompts:
            tokens = np.repeat(np.array(blocks, np.int32), BLOCK)
            self._count += 1
            request = Request(
                self._count.to_bytes(16, "big"),
                tokens,
                SamplingParams(temperature=0.0),
                StopRules(1, ignore_eos=True),
            )
            self._done.clear()
            self.loop.submit(request, self._sink)
            if not self._done.wait(60):
                raise RuntimeError("a request did not end")
            self._settle()
        self.loop.stop()

    def _settle(self) -> None:
        """A worker computes for some 0.3 s between two prompts; here copies get the time they
        need."""
        quiet = 0
        while self.scheduler.tiers.on and quiet < QUIET_LOOKS:
            self.loop.post(lambda _: None)
            time.sleep(0.001)
            load = self.loop.load.tiers
            quiet = quiet + 1 if load is not None and not load.held_slots else 0

    def _sink(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, RequestFailed):
                raise RuntimeError(f"a request failed: {event.reason}")
            if isinstance(event, SequenceEnded):
                self._done.set()


def main() -> None:
    """Prints hits by tier, and those of ideal caches."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", default="")
    parser.add_argument("--pages", type=int, default=400)
    parser.add_argument("--host", type=int, default=1600)
    parser.add_argument("--disk", type=int, default=8000)
    parser.add_argument("--policy", default="lru", choices=sorted(EVICTION_POLICIES))
    parser.add_argument("--chats", action="store_true", help="drawn conversations, no trace")
    parser.add_argument("--ready", type=int, nargs="+", default=[saving.READY_SHARE])
    options = parser.parse_args()
    prompts = chats() if options.chats else trace(options.trace)
    print(f"{len(prompts)} requests, {sum(map(len, prompts))} blocks of {BLOCK} tokens")
    sizes = [(options.pages, 0, 0), (options.pages, options.host, 0)]
    sizes.append((options.pages, options.host, options.disk))
    for share in options.ready:
        print(f"one page in {share} is kept ready")
        saving.READY_SHARE = fetching.READY_SHARE = share  # type: ignore[misc]
        for pages, slots, objects in sizes:
            replay_once(prompts, pages, slots, objects, options.policy)


def replay_once(
    prompts: Sequence[Sequence[int]], pages: int, slots: int, objects: int, policy: str
) -> None:
    """Prints the hits of one run."""
    with tempfile.TemporaryDirectory() as folder:
        replay = Replay(pages, slots, objects, policy, folder)
        replay.run(prompts)
    cached, total = replay.scheduler.admission.cached_tokens // BLOCK, sum(map(len, prompts))
    load = replay.scheduler.tiers.load()
    loaded = {} if load is None else load.loaded_tokens
    by_tier = {tier: tokens // BLOCK for tier, tokens in loaded.items()}
    best = ideal(prompts, pages + slots + objects)
    print(
        f"  pool {pages}, host {slots}, disk {objects}: {cached} hits ({cached / total:.1%}),"
        f" of them loaded {by_tier}; ideal {best} ({best / total:.1%}):"
        f" {cached / max(1, best):.1%} of it"
    )
    if load is not None:
        print(f"    {dict(load.decisions)}, failures {dict(load.late)}")


if __name__ == "__main__":
    main()
