"""Adapters on several ranks and stages: each reads its slices of what rank 0 holds, and the tokens
are those of one process and of peft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapters_kit import adapter, answers, write_adapter
from engine_kit import build, check_baseline, finish, held, submit
from paths_kit import prompt_of
from references import References, references
from test_engine_structure import PERSON, grammar_of
from tiny_families import DENSE
from tiny_models import write_tiny_model

from engine.adapters.shared import mapped, shared
from engine.adapters.types import AdapterError
from engine.beams.params import BeamParams
from engine.engine import Engine
from engine.ranks.process import ADAPTER, STEP
from engine.ranks.steps import RankAdapters, StepMessages, Told, decode
from engine.step.plan import StepPlan
from engine.types import SamplingParams

pytestmark = pytest.mark.timeout(300)
LAYERS = {"layers": 4}
FUSED = {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LAYERS, {}),
    "phi3": (DENSE["phi3"] | LAYERS, FUSED),
    "qwen3": ({"family": "qwen3", "head_dim": 32, **LAYERS}, {}),
    "gemma3": (DENSE["gemma3"], {}),
}
GRIDS = [("llama", 1, 2)]
"""Model, stages, ranks of each."""
SLOW = [(name, pp, tp) for name in MODELS for pp, tp in ((1, 2), (1, 4), (2, 1), (2, 2))]
CASES = [*GRIDS, *(pytest.param(each, marks=pytest.mark.matrix) for each in SLOW[1:])]
SMALL = {"num_pages": 24, "max_sequences": 6, "max_step_tokens": 64}
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=11)
SCORED = SamplingParams(temperature=0.0, top_logprobs=0)
WIDE = BeamParams(3)
FORMED = SamplingParams(temperature=1.5, seed=3, grammar=grammar_of(PERSON))


def started(path: Path, folders: list[Path], **options: Any):
    named = tuple(f"a{i}={folder}" for i, folder in enumerate(folders))
    return build(path, max_adapters=2, adapters=named, **SMALL, **options)


def one_of(want: References, length: int) -> list[int]:
    return want(prompt_of(length), 12, past_end=True).tokens


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_one_process(case, tmp_path):
    """Three adapters for two slots and rows of none, in chunks, from the cache, preempted,
    resumed, drawn, by a grammar, scored and as beams."""
    name, pp, tp = case
    model, kind = MODELS[name]
    path = write_tiny_model(tmp_path / "model", **model)
    ranks = [{"r": 8}, {"r": 16}, {"r": 2, "use_rslora": True}]
    folders = [
        write_adapter(path, tmp_path / str(i), i, **own, **kind) for i, own in enumerate(ranks)
    ]
    one, several = started(path, folders), started(path, folders, pp=pp, tp=tp)
    want: list[References] = [*(answers(path, folder) for folder in folders), references(path)]
    try:
        own = [*(info.digest for info in several.adapters.named()), b""]
        assert own[:3] == [info.digest for info in one.adapters.named()]
        for _ in range(2):
            with held(several):
                runs = [
                    (
                        which,
                        submit(several, prompt_of(length), 30, adapter=own[which], ignore_eos=True),
                    )
                    for length in (20, 90)
                    for which in range(4)
                ]
            finish(*(run for _, run in runs))
            for which, run in runs:
                want[which].check(run, 30)
        assert several.load().prompt_tokens_cached > 0
        # With few pages of windows fewer run at once.
        assert several.load().preemptions > 0 or len(several.pools) > 1
        given = one_of(want[1], 45)[:3]
        run = submit(several, prompt_of(45), 12, adapter=own[1], generated=[given], ignore_eos=True)
        finish(run)
        assert given + run.tokens[0] == one_of(want[1], 45)
        for sampling in (DRAWN, FORMED):
            found = []
            for engine in (one, several):
                run = submit(
                    engine, prompt_of(37), 16, adapter=own[0], sampling=sampling, choices=2
                )
                finish(run)
                found.append(run.tokens)
            assert found[0] == found[1]
        check_scores_and_beams(one, several, own[0], beams=pp == 1)
        for engine in (one, several):
            check_baseline(engine)
    finally:
        one.stop()
        several.stop()


def check_scores_and_beams(one: Engine, several: Engine, digest: bytes, *, beams: bool) -> None:
    """Log probabilities of a prompt, and beams: those of one process."""
    common: dict[str, Any] = {"adapter": digest, "ignore_eos": True}
    runs = [
        submit(engine, prompt_of(70), 4, sampling=SCORED, prompt_logprobs=True, **common)
        for engine in (one, several)
    ]
    finish(*runs)
    scores = [[record.logprob for record in run.scored.records] for run in runs if run.scored]
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-4)
    assert len(scores[0]) == 69
    if beams:
        runs = [submit(each, prompt_of(20), 8, beams=WIDE, **common) for each in (one, several)]
        finish(*runs)
        assert runs[0].tokens == runs[1].tokens
        assert len({tuple(tokens) for tokens in runs[0].tokens}) == WIDE.width


def test_memory_that_ranks_share():
    """Pairs of any sizes, at any place; and memory that another adapter took is found out."""
    own = adapter(3, rows=7)
    made = shared(own)
    assert made.file is not None
    found = mapped(made.file.path, own.digest)
    assert found.digest == own.digest
    assert found.rank == own.rank
    assert found.modules.keys() == own.modules.keys()
    for name, pair in own.modules.items():
        assert torch.equal(found.modules[name].a, pair.a)
        assert torch.equal(found.modules[name].b, pair.b)
        assert found.modules[name].scale == pair.scale
    with pytest.raises(AdapterError, match="has another's"):
        mapped(made.file.path, bytes(32))
    path = made.file.path
    del made
    with pytest.raises(OSError, match=path):
        mapped(path, own.digest)


def a_plan() -> StepPlan:
    """Of one row."""
    names = "token_ids positions row_slots sample_tokens sample_slots sample_generations"
    names += " sample_indices copy_source copy_target write_slots write_tokens"
    one = dict.fromkeys((*names.split(), "query_lens", "context_lens"), np.ones(1, np.int32))
    table = np.ones((1, 1), np.int32)
    return StepPlan(number=0, num_decodes=1, sample=None, page_table=table, **one)


@pytest.mark.parametrize("who", Told._fields)
def test_what_another_rank_hears(who, monkeypatch, tmp_path):
    """A slot's memory, before the first step that wants it, and once: where it lies, or its pieces,
    of which the first rank of another host leaves a note to the others. None stays."""
    monkeypatch.setattr("engine.ranks.steps._PIECE_BYTES", 100)
    monkeypatch.setattr("engine.ranks.steps._KEPT_STEPS", 2)
    own = [shared(adapter(number)) for number in range(2)]
    messages, first, rank = StepMessages(), RankAdapters(tmp_path), RankAdapters(tmp_path)
    for wanted, count in (((0, own[0]), 2), ((0, own[0]), 1), ((0, own[1]), 2), ((1, own[1]), 2)):
        plan = replace(
            a_plan(), adapters=np.array([wanted[0]], np.int32), adapters_wanted=(wanted,)
        )
        told = list(messages.of(plan))
        found = [[bytes(frame) for frame in getattr(each, who)] for each in told]
        assert [message[0] for message in found] == [ADAPTER, STEP][-count:]
        for each, message in zip(told, found[:-1], strict=False):
            pieces = message[4:]
            assert (len(pieces) > 1) == (who == "first")
            assert all(len(piece) <= 100 for piece in pieces)
            if who == "further":
                first.put([bytes(frame) for frame in each.first[1:]])
            rank.put(message[1:])
        heard = rank.completed(decode(found[-1][1:])).adapters_wanted
        assert [(slot, each.digest) for slot, each in heard] == [(wanted[0], wanted[1].digest)]
        assert heard[0][1].modules.keys() == wanted[1].modules.keys()
    assert len(list(tmp_path.iterdir())) == (0 if who == "here" else 3 - (who == "first"))
    for _ in range(3):
        for each in (first, rank):
            each.completed(a_plan())
    assert not list(tmp_path.iterdir())


def test_a_first_rank_that_notes_nothing_is_waited_for_in_vain(monkeypatch, tmp_path):
    monkeypatch.setattr("engine.ranks.steps._NOTE_S", 0.1)
    with pytest.raises(AdapterError, match="has got no memory of an adapter"):
        RankAdapters(tmp_path).put([b"0", bytes(32), b"adapter-0"])
