"""Conversations with models with windows take random paths from turn to turn: computed here or
there, handed off, fetched, from host memory, from a store, forked, resumed and preempted. Every
answer is that of transformers."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import Run, build, check_baseline, finish, hand_off, submit
from references import NOISE, first_difference, references
from test_windows import TINY
from tiny_families import EVERY
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.engine import Engine
from engine.tiers.peers import FetchWanted
from engine.tiers.tiers import HostTiers
from engine.types import PeerFetch
from prefixes.keys import page_keys, salt_of

MAX_TOKENS = 12
TURNS = 2
SMALL = {"max_sequences": 6, "max_step_tokens": 64, "max_context_tokens": 400}
SMALL |= {"poison_freed_pages": True}
FAMILIES = {**TINY, "lfm2": EVERY["lfm2"], "gemma4": EVERY["gemma4"]}
SEEDS = [
    ("gpt_oss", 1),
    *(
        pytest.param(family, seed, marks=pytest.mark.slow)
        for family in FAMILIES
        for seed in range(2, 5)
    ),
]


class Peers:
    """Two engines: one with host memory and a store below a small pool, and one without. Each may
    fetch from the other; the pages go over by hand."""

    def __init__(self, path: Path, folder: Path) -> None:
        store = f"disk:{folder}/kv?gib=0.2"
        small = {"num_pages": 61, "kv_host_bytes": 2 << 20, "kv_stores": (store,)}
        self.engines = build(path, **SMALL, **small), build(path, **SMALL, num_pages=201)
        self.fetched = 0
        for engine, holder in zip(self.engines, self.engines[::-1], strict=True):
            engine.fetching.fetch_by(lambda wanted, to=engine, of=holder: self._ask(wanted, to, of))

    def _ask(self, wanted: FetchWanted, to: Engine, of: Engine) -> None:
        def held(pages: list[np.ndarray], _loaded: int) -> None:
            whole = any(map(len, pages))
            if whole:
                self.fetched += 1
                for group, (source, part) in enumerate(zip(pages, wanted.parts, strict=True)):
                    target = torch.from_numpy(part.pages).long()
                    moved = of.pools[group].data[torch.from_numpy(source).long()]
                    to.pools[group].data[target] = moved
            of.fetching.let_go(wanted.id)
            to.fetching.fetched(wanted.id, len(pages[0]), others=whole)
            to.fetching.freed(wanted.id)

        of.fetching.hold(wanted.id, [part.keys for part in wanted.parts], held)

    def usable(self, engine: Engine, prompt: list[int]) -> int:
        """Leading pages behind which an engine can go on, of all that is in pool and host."""
        found: list[int] = []
        ready = threading.Event()

        def look(scheduler) -> None:
            config = scheduler.config
            salt = salt_of(config.kv_precision, b"")
            keys = page_keys(np.array(prompt[:-1], np.int32), config.page_size, salt)
            tiers = scheduler.tiers
            cached = scheduler.blocks.count_cached(keys)
            known = tiers._reachable(keys) if tiers.on else scheduler.others.resumable(keys, cached)
            found.append(known)
            ready.set()

        engine._loop.post(look)
        assert ready.wait(60)
        return found[0]

    def fetch(self, one: Engine, other: Engine, prompt: list[int]) -> Run:
        pages = self.usable(other, prompt)
        run = submit(
            one,
            prompt,
            MAX_TOKENS,
            ignore_eos=True,
            fetch=PeerFetch("peer", pages) if pages else None,
        )
        finish(run)
        return run

    def close(self) -> None:
        for engine in self.engines:
            wait_until(lambda: not engine.load().tiers or not engine.load().tiers.held_slots)
            check_baseline(engine)
            assert engine.load().damaged_pages == 0
            engine.stop()


def turn(peers: Peers, rng: random.Random, prompt: list[int]) -> Run:
    one, other = rng.sample(peers.engines, 2)
    path = rng.choice(["whole", "handed off", "fetched", "fetched", "forked"])
    if path == "handed off":
        return hand_off(one, other, prompt, MAX_TOKENS, ignore_eos=True)
    if path == "fetched":
        return peers.fetch(one, other, prompt)
    choices = 2 if path == "forked" else 1
    run = submit(one, prompt, MAX_TOKENS, choices=choices, ignore_eos=True)
    finish(run)
    return run


@pytest.mark.parametrize(("family", "seed"), SEEDS)
def test_every_path_gives_the_tokens_of_transformers(family, seed, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.tiers.peers.MOST_SHARE", 2)  # The pools are small.
    monkeypatch.setattr(HostTiers, "note_rate", lambda *_: None)  # Loads are always sooner.
    path = write_tiny_model(tmp_path / "model", **FAMILIES[family])
    peers, answers, rng = Peers(path, tmp_path), references(path), random.Random(seed)
    shared = np.random.default_rng(seed).integers(1, 384, 40).tolist()
    talks = [
        [*shared[: rng.choice([0, 16, 40])], *(rng.randrange(1, 384) for _ in range(70 + 20 * at))]
        for at in range(7)
    ]
    one, other = peers.engines
    for number in range(TURNS + 2):
        for at, prompt in enumerate(talks):
            if number == TURNS:  # More than its pool holds.
                run = submit(one, prompt, MAX_TOKENS, ignore_eos=True)
                finish(run)
            elif number > TURNS:
                run = peers.fetch(other, one, prompt)
            else:
                run = turn(peers, rng, prompt)
            want = answers(prompt, MAX_TOKENS, past_end=True)
            for tokens in run.tokens:
                if tokens != want.tokens:
                    assert want.margins[first_difference(tokens, want.tokens)] < NOISE
            if number != TURNS:
                talks[at] = [*prompt, *want.tokens, *(rng.randrange(1, 384) for _ in range(9))]
    assert peers.fetched >= 1
    loaded = peers.engines[0].load().tiers.loaded_tokens
    if seed == 1:  # Elsewhere chance may have it that all is in the pool, or saved too late.
        assert loaded["host"] + loaded["disk"] > 0
    peers.close()
