"""Whole experts a rank beside what else changes a step: adapters, hooks, drafts, tiers, beams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from adapters_kit import answers, write_adapter
from breaking_hooks import POINTS
from engine_kit import finish, running, submit
from heads_kit import write_head
from hooks_kit import PROMPT, check_rank_1, fixture_of_installed_hooks  # noqa: F401
from paths_kit import prompt_of
from references import references
from test_mtp import write_model
from test_tiers_engine import SMALL, conversations, talk
from test_tiers_stores import SMALL as STORED
from test_tiers_stores import conversations as long_conversations
from test_tiers_stores import secret  # noqa: F401
from tiny_families import EXPERTS
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.beams.params import BeamParams
from engine.engine import Engine

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(300)]
WHOLE = {"tp": 2, "expert_parallel": True}
LENGTHS = (5, 70, 150)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(name="model", scope="module")
def fixture_of_model(tmp_path_factory) -> Path:
    """All feed-forwards are of experts."""
    folder = tmp_path_factory.mktemp("whole-experts")
    return write_tiny_model(folder, **EXPERTS["qwen3_moe"] | {"layers": 5, "max_positions": 1024})


def speaks(engine: Engine, path: Path) -> None:
    """As transformers does; twice, the second time from the cache."""
    for _ in range(2):
        runs = [submit(engine, prompt_of(length), 16, ignore_eos=True) for length in LENGTHS]
        finish(*runs)
        for run in runs:
            references(path).check(run, 16)


def test_an_adapter(model: Path, tmp_path: Path) -> None:
    """Of attention: adapters reach no expert. Rows of it, and of the model alone."""
    folder = write_adapter(model, tmp_path / "adapter", target_modules=ATTENTION)
    want = (answers(model, folder), references(model))
    with running(model, max_adapters=1, adapters=(f"a={folder}",), **WHOLE) as engine:
        (own,) = engine.adapters.named()
        runs = [
            (which, submit(engine, prompt_of(length), 16, adapter=digest, ignore_eos=True))
            for length in LENGTHS
            for which, digest in enumerate((own.digest, b""))
        ]
        finish(*(run for _, run in runs))
        for which, run in runs:
            want[which].check(run, 16)
    adapted, plain = ([each(prompt_of(length), 16).tokens for length in LENGTHS] for each in want)
    assert adapted != plain


def test_a_hook(model: Path) -> None:
    """Rows are narrowed on both ranks; one that fails on one of them fails its own request."""
    found = []
    for options in ({}, WHOLE):
        with running(model, hooks=("quest?sparse_tokens=256",), **options) as engine:
            run = submit(engine, prompt_of(500), 16, ignore_eos=True)
            finish(run)
            assert not engine.load().hook_failures
            found.append(run.tokens)
    assert found[0] == found[1]
    with running(model, hooks=("on-rank-1",), **WHOLE) as engine:
        check_rank_1(engine, POINTS[2:4])


DRAFTS: dict[str, Callable[[Path, Path], tuple[Path, str]]] = {
    "suffix": lambda model, _: (model, "suffix"),
    "head": lambda model, folder: (model, str(write_head(folder / "head", model))),
    "mtp": lambda _, folder: (write_model(folder, "glm4_moe")[0], "mtp"),
}
"""The model and its drafts. The draft layer of `mtp` has experts, too."""


@pytest.mark.parametrize("kind", DRAFTS)
def test_drafts(kind: str, model: Path, tmp_path: Path) -> None:
    path, drafts = DRAFTS[kind](model, tmp_path)
    with running(path, speculation=drafts, **WHOLE) as engine:
        speaks(engine, path)
        assert engine.load().speculation.drafted_tokens > 0


@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_a_host_tier(kv: str, model: Path) -> None:
    prompts = conversations(24)
    with running(model, num_pages=800, kv_cache_dtype=kv) as large:
        want = talk(large, prompts, 2)
    with running(model, kv_cache_dtype=kv, **SMALL, **WHOLE) as small:
        assert talk(small, prompts, 2) == want
        assert small.load().tiers.loaded_tokens["host"] > 0


@pytest.mark.usefixtures("no_hurry")
def test_a_store(model: Path, tmp_path: Path, secret: str) -> None:  # noqa: F811
    """A second engine finds what the first has put there."""
    options = {"kv_secret_file": secret, "kv_stores": (f"dir:{tmp_path}/kv?gib=0.1",)}
    options |= {**STORED, "kv_host_bytes": 2 * STORED["kv_host_bytes"], **WHOLE}
    prompts = long_conversations(24)
    with running(model, num_pages=400, page_size=64) as large:
        want = talk(large, prompts, 1)
    for at in range(2):
        with running(model, **options) as engine:
            assert talk(engine, prompts, 1) == want
            assert (engine.load().tiers.loaded_tokens["dir"] > 0) == bool(at)
            wait_until(lambda: engine.load().tiers.held_slots == 0)


def test_beams(model: Path) -> None:
    found = []
    for options in ({}, WHOLE):
        with running(model, **options) as engine:
            run = submit(engine, PROMPT, 12, beams=BeamParams(4))
            finish(run)
            found.append(run.tokens)
    assert found[0] == found[1]
