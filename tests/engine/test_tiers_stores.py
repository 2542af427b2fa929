"""Whole engines with a small pool, a small host tier and a store speak as one with a large pool."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
from engine_kit import build, check_baseline, finish, running, submit
from test_tiers_engine import talk
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.config import EngineConfig
from engine.engine import Engine, EngineError
from faults import failpoints

MIB = 1 << 20
SMALL = MappingProxyType(
    {
        "num_pages": 41,
        "page_size": 64,
        "max_sequences": 4,
        "max_step_tokens": 256,
        "kv_host_bytes": 3 * MIB // 2,
    }
)
COUNT, ROUNDS = 24, 2


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, max_positions=1024)


def conversations(count: int, seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 384, int(rng.integers(270, 340))).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def want(path):
    with running(path, num_pages=400, page_size=64, max_step_tokens=256) as large:
        return talk(large, conversations(COUNT), ROUNDS)


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text("a secret of some length")
    return str(file)


def speaks(engine: Engine, want) -> None:
    """Takes the conversations' turns; nothing is left behind."""
    try:
        assert talk(engine, conversations(COUNT), ROUNDS) == want
        wait_until(lambda: engine.load().tiers.held_slots == 0)
        check_baseline(engine)
    except BaseException:
        engine.stop()
        raise


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("disk", 1),
        pytest.param("dir", 1, marks=pytest.mark.matrix),
        pytest.param("disk", 2, marks=pytest.mark.slow),
        pytest.param("dir", 2, marks=pytest.mark.matrix),
        pytest.param("dir", 4, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.usefixtures("no_hurry")
def test_a_store_below_a_small_host_tier(path, want, tmp_path, secret, kind, ranks):
    options = {**SMALL, "tp": ranks, "kv_secret_file": secret}
    if ranks > 2:  # Of two KV heads, each lies on two of four ranks.
        options["kv_host_bytes"] = SMALL["kv_host_bytes"] * 2
    address = f"{kind}:{tmp_path}/kv?gib=0.1"
    with running(path, **options, kv_stores=(address,)) as engine:
        speaks(engine, want)
        loaded = engine.load().tiers.loaded_tokens
    assert loaded[kind] >= 256
    with running(path, **options, kv_stores=(address,)) as again:
        prompts = conversations(COUNT)
        runs = [submit(again, prompt, 5) for prompt in prompts]
        finish(*runs)
        assert [run.tokens[0] for run in runs] == [answers[0] for answers in want]
        assert again.load().tiers.loaded_tokens[kind] >= 256, "an object outlives the worker"


@pytest.mark.usefixtures("no_hurry")
def test_a_page_that_is_found_before_and_after_a_fetch_is_let_go(path, tmp_path):
    """The prompt's first page is in the pool, since another one began with it; the rest is not."""
    options = {**SMALL, "kv_host_bytes": 640 << 10}
    with running(path, **options, kv_stores=(f"disk:{tmp_path}/kv?gib=0.1",)) as engine:
        prompts = conversations(COUNT)
        for prompt in prompts:
            finish(submit(engine, prompt, 5))
        finish(submit(engine, prompts[0][:66], 2))
        before = engine.load().tiers.loaded_tokens["disk"]
        finish(submit(engine, prompts[0], 5))
        assert engine.load().tiers.loaded_tokens["disk"] > before
        wait_until(lambda: engine.load().tiers.held_slots == 0)


@pytest.mark.matrix
@pytest.mark.usefixtures("no_hurry")
def test_two_stores(path, want, tmp_path, secret):
    addresses = tuple(f"{kind}:{tmp_path}/{kind}?gib=0.1" for kind in ("disk", "dir"))
    with running(path, **SMALL, kv_stores=addresses, kv_secret_file=secret) as engine:
        speaks(engine, want)
        moved = engine.load().tiers.bytes_moved
    assert moved["disk store"] > 0
    assert moved["dir store"] > 0


POINTS = ("store.lookup", "store.load", "store.loaded", "store.store")
FAULTS = [(point, action) for point in POINTS for action in ("raise", "sleep:0.4", "hang", "kill")]


@pytest.mark.parametrize(
    ("point", "action", "ranks"),
    [
        ("store.loaded", "kill", 1),
        *(
            pytest.param(*one, 1, marks=pytest.mark.matrix)
            for one in FAULTS
            if one != ("store.loaded", "kill")
        ),
        *(
            pytest.param(point, action, 2, marks=pytest.mark.matrix)
            for point in POINTS
            for action in ("kill", "hang")
        ),
    ],
)
def test_a_store_that_fails_costs_time_alone(path, want, tmp_path, point, action, ranks):
    failpoints.arm(f"{point}={action}@3")
    try:
        engine = build(path, **SMALL, tp=ranks, kv_stores=(f"disk:{tmp_path}/kv?gib=0.1",))
    finally:
        failpoints.arm("")
    speaks(engine, want)
    engine.stop()


def test_what_the_engine_says_of_a_store_that_cannot_be(path, tmp_path, monkeypatch):
    """All but the first are said before weights are read."""
    shared = {"kv_stores": (f"dir:{tmp_path}?gib=1",)}
    for options, message in (
        ({"kv_stores": ("disk:/proc/no?gib=1",)}, "/proc/no"),
        ({"kv_stores": ("tape:x",)}, "no store of this kind"),
        ({"kv_stores": ("disk:/tmp/x",)}, "its size is missing"),
        (shared, "it needs kv_secret_file"),
        (shared | {"kv_secret_file": "/nowhere"}, "kv_secret_file /nowhere: No such file"),
        ({"kv_stores": ("disk:/tmp/x?gib=1",), "kv_host_bytes": 0}, "needs kv_host_gib"),
        ({"kv_host_bytes": 1 << 60}, "wanted for KV pages, this machine has"),
    ):
        if "/proc/no" not in message:
            monkeypatch.setattr("engine.engine.load", None)
        config = EngineConfig(model=str(path), **{**SMALL, **options})
        with pytest.raises(EngineError, match=message):
            Engine.build(config)
