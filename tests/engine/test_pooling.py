"""Prompts whose hidden states are pooled: equal to transformers' by every path of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import Run, build, check_baseline, finish, held, running, stop, submit
from quantised_folders import fp8_reference
from tiny_models import (
    reference_model,
    write_modules,
    write_pooling_model,
    write_scoring_model,
    write_tiny_model,
)

from engine.engine import Engine
from engine.model import ModelError
from engine.pooling.requests import Pooling, PoolKind
from engine.schedule.scheduler import Scheduler
from engine.types import Event, FailureReason, Mode, PrefillStarted

NOISE = 1e-4
KINDS = list(PoolKind)
PROMPTS = [np.random.default_rng(length).integers(1, 380, length).tolist() for length in
           (1, 5, 16, 33, 300)]  # fmt: skip
"""Up to more than two steps."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"family": "qwen3", "head_dim": 32},
    "gemma3": {"family": "gemma3_text", "head_dim": 32, "layers": 6, "sliding_window": 24},
}
LASTTOKEN = ("Pooling", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False})


def pool(engine: Engine, prompt: list[int], pooling: Pooling, **more: Any) -> Run:
    return submit(engine, prompt, 0, mode=Mode.POOL, pooling=pooling, **more)


def values(run: Run) -> Any:
    assert run.pooled is not None
    return run.pooled.values


@cache
def states_of(path: Path, prompt: tuple[int, ...]) -> Any:
    """[T, H] of transformers."""
    with torch.no_grad():
        body = reference_model(path, dtype=torch.float32).model
        return body(torch.tensor([prompt])).last_hidden_state[0].numpy()


def expected(path: Path, prompt: list[int], kind: PoolKind) -> Any:
    states = states_of(path, tuple(prompt))
    return {PoolKind.LAST: states[-1], PoolKind.MEAN: states.mean(0), PoolKind.FIRST: states[0]}[
        kind
    ]


def check_alike(found: Any, wanted: Any) -> None:
    assert np.abs(found - wanted).max() <= NOISE * max(1.0, np.abs(wanted).max())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    "family",
    ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in list(FAMILIES)[1:])],
)
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"tp": 2}, marks=pytest.mark.slow),
     pytest.param({"speculation": "suffix"}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_pools_as_transformers_does_beside_running_sequences(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    path = write_tiny_model(tmp_path / family, **FAMILIES[family])
    with running(path, num_pages=260, **options) as engine:
        alone = submit(engine, PROMPTS[2], 24)
        finish(alone)
        with held(engine):
            beside = submit(engine, PROMPTS[2], 24)
            runs = [pool(engine, prompt, Pooling(kind)) for prompt in PROMPTS for kind in KINDS]
        finish(beside, *runs)
        assert beside.tokens == alone.tokens
        for run, (prompt, kind) in zip(runs, [(p, k) for p in PROMPTS for k in KINDS], strict=True):
            check_alike(values(run), expected(path, prompt, kind))


def test_short_prompts_share_a_step(llama: Path) -> None:
    with running(llama) as engine:
        before = engine.load().steps
        with held(engine):
            runs = [pool(engine, PROMPTS[2], Pooling(PoolKind.MEAN)) for _ in range(8)]
        finish(*runs)
        assert engine.load().steps - before == 1  # 8 of 16 tokens, in a step of 128


def test_last_tokens_come_from_the_cache_and_means_are_computed_whole(llama: Path) -> None:
    with running(llama) as engine:
        prompt = PROMPTS[4]
        for kind, computed in (
            (PoolKind.LAST, 300),
            (PoolKind.LAST, 300 - 288),
            (PoolKind.MEAN, 300),
        ):
            before = engine.load().prompt_tokens_computed
            run = pool(engine, prompt, Pooling(kind))
            finish(run)
            check_alike(values(run), expected(llama, prompt, kind))
            check_baseline(engine)
            assert engine.load().prompt_tokens_computed - before == computed
        chat = submit(engine, prompt, 4)  # What was pooled is found by prompts that go on, too.
        finish(chat)
        assert engine.load().prompt_tokens_cached == 2 * 288


@pytest.mark.parametrize("tokens", [20, 300])
def test_a_preempted_prompt_is_pooled_from_its_beginning(llama: Path, tokens: int) -> None:
    """Whether some of its chunks are launched or all of them."""
    engine, preempted = build(llama, max_step_tokens=32), []

    def preempt(scheduler: Scheduler) -> None:
        (active,) = scheduler.requests.by_id.values()
        preempted.append(bool(scheduler.batch.prefills))
        scheduler.requests.preempt(active.sequences[0])

    class Preempted(Run):
        def sink(self, events: Sequence[Event]) -> None:
            if any(isinstance(event, PrefillStarted) for event in events) and not preempted:
                engine._loop.post(preempt)
            super().sink(events)

    prompt, pooling = PROMPTS[4][:tokens], Pooling(PoolKind.MEAN)
    first = pool(engine, [1], Pooling())
    finish(first)
    run = Preempted(first.request)
    ids = np.array(prompt, np.int32)
    run.request = replace(run.request, id=b"preempted", prompt_ids=ids, pooling=pooling)
    engine.submit(run.request, run.sink)
    finish(run)
    assert preempted == [tokens == 300]
    assert engine.load().preemptions == 1
    check_alike(values(run), expected(llama, prompt, PoolKind.MEAN))
    stop(engine)


def test_results_are_cut_and_normalised(llama: Path) -> None:
    with running(llama) as engine:
        run = pool(engine, PROMPTS[3], Pooling(PoolKind.MEAN, normalise=True, dimensions=24))
        finish(run)
        wanted = expected(llama, PROMPTS[3], PoolKind.MEAN)[:24]
        check_alike(values(run), wanted / np.linalg.norm(wanted))


def test_a_prompt_as_long_as_the_context_is_pooled_and_a_cancelled_one_leaves_nothing(
    llama: Path,
) -> None:
    with running(llama, max_context_tokens=320, max_step_tokens=32) as engine:
        prompt = [*PROMPTS[4], *PROMPTS[4][:20]]
        gone = pool(engine, prompt, Pooling())
        engine.cancel(gone.request.id)
        run = pool(engine, prompt, Pooling())
        finish(run)
        check_alike(values(run), expected(llama, prompt, PoolKind.LAST))
        longer = pool(engine, [*prompt, 1], Pooling())
        assert longer.done.wait(60)
        assert longer.failed is not None
        assert longer.failed.reason is FailureReason.TOO_LARGE


# -- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        (LASTTOKEN[1], PoolKind.LAST),
        ({"pooling_mode": "mean"}, PoolKind.MEAN),
        ({"pooling_mode_cls_token": True}, PoolKind.FIRST),
    ],
)
def test_folders_of_sentence_transformers_say_how_to_pool(
    tmp_path: Path, pooling: dict[str, Any], kind: PoolKind
) -> None:
    """Their tensors lack the body's name, and they have no head."""
    modules = [("Pooling", pooling), ("Normalize", {})][: 1 + (kind is PoolKind.LAST)]
    path = write_pooling_model(tmp_path / "model", *modules, **FAMILIES["qwen3"])
    with running(path) as engine:
        stated = engine.model.pooling
        assert (stated.kind, stated.normalise, stated.width) == (kind, kind is PoolKind.LAST, 64)
        assert not stated.generates
        run = pool(engine, PROMPTS[3], Pooling(kind))
        finish(run)
        from transformers import AutoModel

        with torch.no_grad():
            model = AutoModel.from_pretrained(path, dtype=torch.float32)
            states = model(torch.tensor([PROMPTS[3]])).last_hidden_state[0].numpy()
        wanted = {
            PoolKind.LAST: states[-1],
            PoolKind.MEAN: states.mean(0),
            PoolKind.FIRST: states[0],
        }
        check_alike(values(run), wanted[kind])


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_heads_that_score_are_those_of_the_checkpoint(tmp_path: Path, tp: int) -> None:
    from transformers import AutoModelForSequenceClassification

    path = write_scoring_model(tmp_path / "model", labels=2, **FAMILIES["qwen3"])
    with running(path, tp=tp) as engine:
        assert (engine.model.pooling.labels, engine.model.pooling.generates) == (2, False)
        runs = [pool(engine, prompt, Pooling(scores=True)) for prompt in PROMPTS]
        finish(*runs)
        model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
        for run, prompt in zip(runs, PROMPTS, strict=True):
            with torch.no_grad():
                check_alike(values(run), model(torch.tensor([prompt])).logits[0].numpy())


@pytest.mark.parametrize("tied", [False, True])
def test_rerankers_score_by_the_logits_of_two_tokens(tmp_path: Path, tied: bool) -> None:
    path = write_tiny_model(tmp_path / "model", **FAMILIES["qwen3"], tie_word_embeddings=tied)
    plain = build(path)
    write_modules(path, ("LogitScore", {"true_token_id": 17, "false_token_id": 23}))
    engine = build(path)
    stated = engine.model.pooling
    assert (stated.labels, stated.by_turns, stated.generates) == (1, True, True)
    assert engine.model.revision != plain.model.revision
    run = pool(engine, PROMPTS[3], Pooling(scores=True))
    finish(run)
    with torch.no_grad():
        logits = reference_model(path, dtype=torch.float32)(torch.tensor([PROMPTS[3]])).logits[
            0, -1
        ]
    check_alike(values(run), (logits[17] - logits[23])[None].numpy())
    lacks = pool(plain, PROMPTS[3], Pooling(scores=True))
    assert lacks.done.wait(60)
    assert lacks.failed is not None
    stop(engine, plain)


@pytest.mark.parametrize(
    ("module", "word"),
    [
        (("Dense", {}), "Dense"),
        (("Pooling", {"pooling_mode_max_tokens": True}), "lasttoken"),
        (("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}), "cls"),
        (("LogitScore", {"true_token_id": "yes"}), "token"),
        (("LogitScore", {}), "true_token_id"),
    ],
)
def test_modules_that_cannot_be_run_are_named(
    tmp_path: Path, module: tuple[str, dict[str, Any]], word: str
) -> None:
    path = write_tiny_model(tmp_path / "model")
    write_modules(path, module)
    with pytest.raises(ModelError, match=word):
        build(path)


# -- SmolLM2, and FP8 ---------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("tp", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_smollm2_embeds_as_transformers_does(demo_model: Path, tp: int) -> None:
    with running(demo_model, tp=tp) as engine:
        runs = [pool(engine, prompt, Pooling(kind)) for prompt in PROMPTS[1:4] for kind in KINDS]
        finish(*runs)
        wanted = [(prompt, kind) for prompt in PROMPTS[1:4] for kind in KINDS]
        for run, (prompt, kind) in zip(runs, wanted, strict=True):
            check_alike(values(run), expected(demo_model, prompt, kind))


STEP = 2.0**-4
"""An input half way between two numbers of FP8 is rounded up or down by the noise of the sums that
made it, and so one of a row differs by a step of FP8."""


@pytest.mark.slow
def test_weights_in_fp8_embed_as_transformers_does_with_them(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", **FAMILIES["llama"], hidden=128)
    with running(path, quantization="fp8") as engine:
        runs = [pool(engine, prompt, Pooling(kind)) for prompt in PROMPTS for kind in KINDS]
        finish(*runs)
        body = fp8_reference(path).model.model
        with torch.no_grad():
            states = [
                body(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in PROMPTS
            ]
        each = [(one, kind) for one in states for kind in KINDS]
        for run, (one, kind) in zip(runs, each, strict=True):
            wanted = {0: one[-1], 1: one.mean(0), 2: one[0]}[kind]
            assert np.abs(values(run) - wanted).max() <= STEP * np.abs(one).max()
