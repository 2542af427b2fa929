"""An engine tells of its pages: a router that follows knows exactly those, and finds prompts."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
import pytest
from engine_kit import build, finish, submit
from tiny_models import write_tiny_model

from engine.schedule.scheduler import Scheduler
from prefixes.codec import Events, Wanted
from prefixes.follower import Follower
from prefixes.index import HOST, POOL, Held, PrefixIndex
from prefixes.keys import prompt_short_keys, short_keys
from prefixes.log import PageLog
from prefixes.reporter import PageReporter

PAGE = 16


class Followed:
    """An engine's pages, as a worker tells a router of them."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.log = PageLog(size=64, most_events=16, most_in_part=16)
        self.index = PrefixIndex()
        wanted: list[Wanted] = []
        self.follower = Follower(self.index, "w", wanted.append, Counter(), Counter())
        self.follower.start(0.0)
        self.reporter = PageReporter(self.log, wanted[0])
        engine.report_pages(
            lambda kind, keys: self.log.write(list(keys), bytes((kind,)) * len(keys))
        )

    def truth(self) -> dict[int, int]:
        """Tiers by key, read where they are kept; and what was told until then is heard."""
        found: dict[int, int] = {}
        ready = threading.Event()

        def look(scheduler: Scheduler) -> None:
            for key in short_keys(scheduler.blocks.keys).tolist():
                found[key] = POOL
            if scheduler.tiers.on:
                for key in short_keys(scheduler.tiers._host.keys).tolist():
                    found[key] = found.get(key, 0) | HOST
            self.hear()
            ready.set()

        self.engine._loop.post(look)
        assert ready.wait(60)
        return found

    def hear(self) -> None:
        while not self.reporter.is_done:
            for message in self.reporter.turn():
                take = self.follower.events if isinstance(message, Events) else self.follower.part
                take(message, 0.0)

    def known(self) -> dict[int, int]:
        keys = [key for shard in self.index._shards for key in shard]
        return {key: self.index.tiers("w", key) for key in keys}


@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_the_index_has_the_pages_of_pool_and_host_tier(tmp_path, precision) -> None:
    model = write_tiny_model(tmp_path, tokenizer=False)
    small = {"num_pages": 41, "max_sequences": 4, "kv_host_bytes": 24 << 20}
    engine = build(model, **small, kv_cache_dtype=precision)
    rng = np.random.default_rng(3)
    try:
        prompts = [rng.integers(1, 384, 70).tolist() for _ in range(16)]
        finish(submit(engine, prompts[0], 5))
        followed = Followed(engine)
        for prompt in prompts:
            finish(submit(engine, prompt, 5, cache_salt=b"acme"))
        truth = followed.truth()
        assert followed.known() == truth
        assert {POOL, HOST} <= set(truth.values())
        # The router's keys of the last prompt are the worker's.
        info, ids = engine.model, np.array(prompts[-1], np.uint32)
        keys = prompt_short_keys(ids, PAGE, info.kv_precision, b"acme")
        assert len(keys) == 4
        assert followed.index.held(keys) == {"w": Held.all(4, 4)}
        for others in (b"", b"others"):
            foreign = prompt_short_keys(ids, PAGE, info.kv_precision, others)
            assert followed.index.held(foreign) == {}
        assert info.prefix_cache
    finally:
        engine.stop()
