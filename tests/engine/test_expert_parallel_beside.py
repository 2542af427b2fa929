"""Experts that ranks, or the workers of a group, hold whole, beside what else changes a step:
adapters, hooks, drafts, precisions, tiers, beams, pooling, pages of others."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters_kit import answers, write_adapter
from breaking_hooks import POINTS
from engine_kit import check_baseline, finish, hand_off, held, running, submit
from expert_groups_kit import grouped
from heads_kit import write_head
from hooks_kit import (  # noqa: F401
    NEIGHBOUR,
    PROMPT,
    check_rank_1,
    fixture_of_installed_hooks,
)
from paths_kit import prompt_of
from references import references
from test_mtp import write_model
from test_pooling import pool, values
from test_ranks import FORMED, SAMPLED, check
from test_tiers_engine import SMALL, conversations, talk
from test_tiers_stores import SMALL as STORED
from test_tiers_stores import conversations as long_conversations
from test_tiers_stores import secret  # noqa: F401
from tiny_families import EXPERTS
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.beams.params import BeamParams
from engine.engine import Engine
from engine.pooling.requests import Pooling, PoolKind
from engine.types import FailureReason, SamplingParams

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(300)]
WHOLE = {"tp": 2, "expert_parallel": True}
LENGTHS = (5, 70, 150)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@contextmanager
def dividing(how: str, path: Path, **options: Any) -> Iterator[list[Engine]]:
    """One engine whose two ranks hold experts whole, or the two workers of a group."""
    if how == "ranks":
        with running(path, **WHOLE, **options) as engine:
            yield [engine]
        return
    folder = path.parent / f"group-{secrets.token_hex(4)}"
    with grouped(path, folder, 2, **options) as engines:
        yield engines
        for engine in engines:
            check_baseline(engine)


@pytest.fixture(name="how", params=["ranks", "group"])
def fixture_of_how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(name="model", scope="module")
def fixture_of_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All feed-forwards are of experts."""
    folder = tmp_path_factory.mktemp("whole-experts") / "model"
    own = EXPERTS["qwen3_moe"] | {"layers": 5, "max_positions": 1024}
    return write_tiny_model(folder, **own)


def speaks(engines: Sequence[Engine], path: Path) -> None:
    """As transformers does; twice, the second time from the cache."""
    for _ in range(2):
        runs = [
            submit(engine, prompt_of(length), 16, ignore_eos=True)
            for engine in engines
            for length in LENGTHS
        ]
        finish(*runs)
        check(references(path), runs, 16)


def together(engines: Sequence[Engine], act: Callable[[Engine], Any]) -> list[Any]:
    """What comes of it on each, all at once."""
    with ThreadPoolExecutor(len(engines)) as threads:
        return list(threads.map(act, engines))


def test_an_adapter(how: str, model: Path, tmp_path: Path) -> None:
    """Of attention: adapters reach no expert. Rows of it, and of the model alone."""
    folder = write_adapter(model, tmp_path / "adapter", target_modules=ATTENTION)
    want = (answers(model, folder), references(model))
    with dividing(how, model, max_adapters=1, adapters=(f"a={folder}",)) as engines:
        runs = []
        for engine in engines:
            (own,) = engine.adapters.named()
            runs += [
                (which, submit(engine, prompt_of(length), 16, adapter=digest, ignore_eos=True))
                for length in LENGTHS
                for which, digest in enumerate((own.digest, b""))
            ]
        finish(*(run for _, run in runs))
        for which, run in runs:
            want[which].check(run, 16)
    adapted, plain = ([each(prompt_of(length), 16).tokens for length in LENGTHS] for each in want)
    assert adapted != plain


SAME: dict[str, tuple[dict[str, Any], Callable[[Engine], Any]]] = {
    "beams": ({}, lambda engine: submit(engine, PROMPT, 12, beams=BeamParams(4))),
    "quest": (
        {"hooks": ("quest?sparse_tokens=256",)},
        lambda engine: submit(engine, prompt_of(500), 16, ignore_eos=True),
    ),
    "choices": ({}, lambda engine: submit(engine, PROMPT, 12, choices=3, sampling=SAMPLED)),
    "grammar": ({}, lambda engine: submit(engine, PROMPT, 40, sampling=FORMED)),
    "fp8 pages": ({"kv_cache_dtype": "fp8"}, lambda engine: submit(engine, prompt_of(70), 12)),
    "seeded drafts": (
        {"speculation": "suffix"},
        lambda engine: submit(engine, prompt_of(9) * 8, 24, sampling=SAMPLED, ignore_eos=True),
    ),
}
"""Options, and a request that speaks as on one process."""


@pytest.mark.parametrize("what", SAME)
def test_the_same_as_one_process(what: str, how: str, model: Path) -> None:
    """Both workers of a group at once."""
    options, ask = SAME[what]
    with running(model, **options) as one:
        want = ask(one)
        finish(want)
    with dividing(how, model, **options) as engines:
        runs = [ask(engine) for engine in engines]
        finish(*runs)
        assert [run.tokens for run in runs] == [want.tokens] * len(engines)
        assert not any(engine.load().hook_failures for engine in engines)


def test_fp8_inputs_are_rounded_as_by_one_worker(tmp_path: Path) -> None:
    """Ranks round slices of attention's output by themselves, and workers have no slices."""
    path = write_tiny_model(tmp_path / "model", **EXPERTS["qwen3_moe"], hidden=128)
    found = []
    with (
        running(path, quantization="fp8") as one,
        dividing("group", path, quantization="fp8") as engines,
    ):
        for engine in (one, *engines):
            runs = [submit(engine, prompt_of(length), 12) for length in LENGTHS]
            finish(*runs)
            found.append([run.tokens for run in runs])
    assert found[1:] == found[:1] * 2


def test_a_hook_that_fails_on_one_rank(model: Path) -> None:
    with running(model, hooks=("on-rank-1",), **WHOLE) as engine:
        check_rank_1(engine, POINTS[2:4])


@pytest.mark.parametrize("point", ["rows_narrowed", "attention_began", "pages_wanted"])
def test_a_hook_that_fails_on_one_worker(point: str, model: Path) -> None:
    """Between two layers of experts, too: the step goes on, and fails nobody else's request."""
    with dividing("group", model, hooks=(f"breaks?at={point}",)) as engines:
        with held(engines[0]):
            beside = [submit(engine, NEIGHBOUR, 12, ignore_eos=True) for engine in engines]
            mine = submit(engines[0], PROMPT, 12, extensions={"breaks": b""})
        finish(*beside)
        assert mine.done.wait(60)
        assert mine.failed is not None
        assert mine.failed.reason is FailureReason.HOOK
        check(references(model), beside, 12)
        speaks(engines, model)


DRAFTS: dict[str, Callable[[Path, Path], tuple[Path, str]]] = {
    "suffix": lambda model, _: (model, "suffix"),
    "head": lambda model, folder: (model, str(write_head(folder / "head", model))),
    "mtp": lambda _, folder: (write_model(folder, "glm4_moe")[0], "mtp"),
}
"""The model and its drafts. The draft layer of `mtp` has experts, too, which groups refuse."""


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        (how, kind)
        for how in ("ranks", "group")
        for kind in DRAFTS
        if (how, kind) != ("group", "mtp")
    ],
)
def test_drafts(how: str, kind: str, model: Path, tmp_path: Path) -> None:
    path, drafts = DRAFTS[kind](model, tmp_path)
    with dividing(how, path, speculation=drafts) as engines:
        speaks(engines, path)
        assert all(engine.load().speculation.drafted_tokens > 0 for engine in engines)


@pytest.mark.parametrize("kv", ["auto", "fp8"])
@pytest.mark.usefixtures("no_hurry")
def test_a_host_tier(kv: str, how: str, model: Path) -> None:
    prompts = conversations(24)
    with running(model, num_pages=800, kv_cache_dtype=kv) as large:
        want = talk(large, prompts, 2)
    with dividing(how, model, kv_cache_dtype=kv, **SMALL) as small:
        assert together(small, lambda own: talk(own, prompts, 2)) == [want] * len(small)
        assert all(own.load().tiers.loaded_tokens["host"] > 0 for own in small)


@pytest.mark.usefixtures("no_hurry")
def test_a_store(how: str, model: Path, tmp_path: Path, secret: str) -> None:  # noqa: F811
    """Engines that are made later find what the first have put there. Workers share it."""
    options = {"kv_secret_file": secret, "kv_stores": (f"dir:{tmp_path}/kv?gib=0.1",)}
    options |= {**STORED, "kv_host_bytes": 2 * STORED["kv_host_bytes"]}
    prompts = long_conversations(24)
    with running(model, num_pages=400, page_size=64) as large:
        want = talk(large, prompts, 1)
    for at in range(2):
        with dividing(how, model, **options) as engines:
            assert together(engines, partial(talk, prompts=prompts, rounds=1)) == [want] * len(
                engines
            )
            for engine in engines:
                assert not at or engine.load().tiers.loaded_tokens["dir"] > 0
                wait_until(lambda engine=engine: engine.load().tiers.held_slots == 0)


def test_pooled_prompts(how: str, model: Path) -> None:
    prompts, kinds = [prompt_of(length) for length in (1, 5, 300)], list(PoolKind)
    found = []
    with running(model) as one, dividing(how, model) as engines:
        for engine in (one, *engines):
            runs = [pool(engine, prompt, Pooling(kind)) for prompt in prompts for kind in kinds]
            finish(*runs)
            found.append([values(run) for run in runs])
    for own in found[1:]:
        for got, want in zip(own, found[0], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("speculation", ["off", "suffix"])
def test_pages_go_between_the_workers_of_a_group(speculation: str, model: Path) -> None:
    """Each to the other one and to a worker by itself, and back, whose steps are others."""
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=5)
    with (
        running(model, max_step_tokens=64, speculation=speculation) as one,
        dividing("group", model, speculation=speculation) as (first, second),
    ):
        want = submit(one, prompt_of(37), 16, sampling=seeded, ignore_eos=True)
        finish(want)
        for at, (source, target) in enumerate(
            ((first, second), (second, first), (one, first), (second, one))
        ):
            run = hand_off(source, target, prompt_of(90, at), 20, choices=1 + at, ignore_eos=True)
            for choice in run.tokens:
                assert len(choice) == 20
            references(model).check(run, 20)
            drawn = hand_off(source, target, prompt_of(37), 16, sampling=seeded, ignore_eos=True)
            assert drawn.tokens == want.tokens
