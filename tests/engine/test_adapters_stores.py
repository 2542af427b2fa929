"""Pages of adapters below the pool: in host memory and in stores each finds its own alone, also
where a name has got another content."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from adapters_kit import write_adapter
from engine_kit import check_baseline, finish, running, submit
from test_stores_servers import address, bucket, mooncake, secret  # noqa: F401
from test_tiers_stores import SMALL, conversations
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.engine import Engine

NAMES = ("", "law", "poems", "later")
"""Without an adapter, with two, and with what takes the place of one."""
COUNT = 8
Answers = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, max_positions=1024)


@pytest.fixture(scope="module")
def folders(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(path, folder / name, i) for i, name in enumerate(NAMES[1:])}


def loaded(engine: Engine, folders: dict[str, Path], *names: str) -> dict[str, bytes]:
    """Digests by name, of the model alone too."""
    found = {name: engine.adapters.load(name, folders[name]).digest for name in names}
    return {"": b""} | found


def asked(engine: Engine, digests: dict[str, bytes], order: list[tuple[str, int]]) -> Answers:
    prompts, found = conversations(COUNT), {}
    for first in range(0, len(order), 2):
        some = order[first : first + 2]
        runs = [submit(engine, prompts[i], 5, adapter=digests[name]) for name, i in some]
        finish(*runs)
        for one, run in zip(some, runs, strict=True):
            assert run.failed is None
            assert found.setdefault(one, run.tokens[0]) == run.tokens[0], one
    return found


@pytest.fixture(scope="module")
def want(path: Path, folders: dict[str, Path]) -> Answers:
    """Each by itself, in a pool that holds everything."""
    with running(path, num_pages=400, page_size=64, max_step_tokens=256, max_adapters=3) as large:
        digests = loaded(large, folders, *NAMES[1:])
        found = asked(large, digests, [(name, i) for name in NAMES for i in range(COUNT)])
    assert all(len({tuple(found[name, i]) for name in NAMES}) > 2 for i in range(COUNT))
    return found


def check(path: Path, folders: dict[str, Path], want: Answers, tier: str, **options: Any) -> None:
    """Prompts that only their adapter tells apart, over a pool that is too small for them."""
    every = [(name, i) for name in NAMES[:3] for i in range(COUNT)]
    options = {**SMALL, "max_adapters": 2, **options}
    with running(path, **options) as engine:
        digests, draw = loaded(engine, folders, "law", "poems"), random.Random(5)
        for turn in range(5):
            order = draw.sample(every, len(every))
            assert asked(engine, digests, order) == {one: want[one] for one in every}
            if turn and engine.load().tiers.loaded_tokens[tier] >= 256:
                break
        assert engine.load().tiers.loaded_tokens[tier] >= 256
        again = engine.adapters.load("law", folders["later"], again=True).digest
        before = engine.load().prompt_tokens_cached
        later = [("later", i) for i in range(COUNT)]
        assert asked(engine, {"later": again}, later) == {one: want[one] for one in later}
        assert engine.load().prompt_tokens_cached == before, "another content finds nothing"
        assert asked(engine, digests | {"law": b""}, [("", 0)]) == {("", 0): want["", 0]}
        wait_until(lambda: engine.load().tiers.held_slots == 0)
        check_baseline(engine)
        assert engine.adapters.held == 0


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("no_hurry")
def test_host_memory(path, folders, want, ranks):
    check(path, folders, want, "host", kv_host_bytes=8 << 20, tp=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["disk", "dir"])
@pytest.mark.usefixtures("no_hurry")
def test_a_store_in_files(path, folders, want, tmp_path, kind, secret):  # noqa: F811
    """Also by the next worker, to which a name means another content."""
    store = {"kv_stores": (f"{kind}:{tmp_path}/kv?gib=0.1",), "kv_secret_file": secret}
    check(path, folders, want, kind, **store)
    with running(path, **SMALL, max_adapters=2, **store) as engine:
        digests = loaded(engine, folders, "poems")
        digests["later"] = engine.adapters.load("law", folders["later"]).digest
        order = [(name, i) for name in ("", "poems", "later") for i in range(COUNT)]
        assert asked(engine, digests, order) == {one: want[one] for one in order}
        assert engine.load().tiers.loaded_tokens[kind] >= 256


@pytest.mark.slow
def test_a_server(path, folders, want, address, secret):  # noqa: F811
    """Mooncake's, and one of S3."""
    store = {"kv_stores": (address,), "kv_secret_file": secret}
    check(path, folders, want, address.partition(":")[0], **store)
