"""Runs engines with a draft head whose steps are those of a GPU, in Triton's interpreter: drafts
and K and V of the head are those of plain PyTorch. Arguments: a scratch folder, then cases."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import interpreted_ptx
import numpy as np
import torch
from engine_kit import build, check_baseline, finish, hand_off, running, submit
from heads_kit import Drafted, PlainHead, write_head
from interpreted_executor import OPTIONS, VOCAB, patches
from interpreted_ranks_kit import on_two_ranks
from references import references
from safetensors.torch import load_file, save_file
from speculation_kit import Switching
from test_mtp import FAMILIES as MTP_FAMILIES
from test_mtp import PlainMtp, write_model
from tiny_models import write_tiny_model

from engine.cuda.speculation.heads import FusedHead, HeadStep
from engine.model.precision.choice import Precision
from engine.types import SamplingParams

DRAFTS, TOKENS = 3, 6
PROMPTS = [np.random.default_rng(size).integers(1, VOCAB, size).tolist() for size in (5, 44)]


def record(fused: FusedHead, told: dict[tuple[int, ...], Drafted]) -> None:
    """Writes down what a head drafts from now on."""
    run, tables = fused.run, fused._tables

    def recorded(step: HeadStep) -> None:
        run(step)
        for row in range(int(step.packed.header[0]) if tables is not None else 0):
            slot = int(step.packed.slots[row])
            length, ready = int(tables.length[slot]), int(tables.ready[slot])
            tokens = tuple(tables.history[slot, : length + 1].tolist())
            places = fused._pool.places(step.packed.page_table[row].long())
            k, v = (each[:, :length].transpose(0, 1) for each in fused._pool.gather(0, places))
            told[tokens] = Drafted(tables.drafts[slot, :ready].tolist(), k, v)

    fused.run = recorded


@contextmanager
def drafting(model: Path, head: Path | str, widths=None, around=patches, **options):
    """An engine; what its head has drafted behind all tokens of a sequence, and its K and V."""
    told: dict[tuple[int, ...], Drafted] = {}
    with around():
        options = {**OPTIONS, "cuda_graphs": False, "speculation": str(head), **options}
        engine = build(model, draft_tokens=DRAFTS, **options)
        if fused := engine._loop._executor._head:
            record(fused, told)
        if widths is not None and engine._loop._scheduler.planner._widths is not None:
            engine._loop._scheduler.planner._widths = widths
        try:
            yield engine, told
            check_baseline(engine)
        finally:
            engine.stop()


def compare(told: dict[tuple[int, ...], Drafted], plain: PlainHead, drafts: set[int]) -> None:
    seen = set()
    for tokens, drafted in list(told.items())[::2]:
        wanted = plain.draft(tokens, max(1, len(drafted.tokens)))
        made = wanted.tokens[: len(drafted.tokens)]
        assert drafted.tokens == made, (drafted.tokens, made)
        torch.testing.assert_close(drafted.k, wanted.k, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(drafted.v, wanted.v, rtol=1e-3, atol=1e-3)
        seen.add(len(drafted.tokens))
    assert seen == drafts, seen


def check_steps(model: Path, head: Path) -> None:
    """Prompts in chunks, beside rows that draft; widths in turns; drawn rows."""
    answers, plain = references(model), PlainHead(head, model)
    widths, drafts = (None, {3}) if head.name == "original" else (Switching(), {0, 1, 2, 3})
    with drafting(model, head, widths, max_step_tokens=40) as (engine, told):
        runs = [submit(engine, prompt, TOKENS, ignore_eos=True) for prompt in PROMPTS]
        drawn = SamplingParams(temperature=1.0, seed=3)
        more = submit(engine, PROMPTS[1], 3, sampling=drawn, ignore_eos=True)
        finish(*runs, more, timeout_s=900)
        for prompt, run in zip(PROMPTS, runs, strict=True):
            assert run.tokens == [answers(prompt, TOKENS, past_end=True).tokens]
    compare(told, plain, drafts)


def check_handoff(model: Path, head: Path) -> None:
    """A worker that decodes nothing computes K and V of prompts. Without a head it hands on none,
    and what is drafted is of the last tokens alone."""
    answers, plain = references(model), PlainHead(head, model)
    speculation = str(head) if head.name == "original" else "off"
    options = {**OPTIONS, "max_step_tokens": 48, "speculation": speculation}
    with drafting(model, head) as (decode, told), patches():
        with running(model, decodes=False, cuda_graphs=False, **options) as prefill:
            run = hand_off(prefill, decode, PROMPTS[1], TOKENS, ignore_eos=True)
            assert run.tokens == [answers(PROMPTS[1], TOKENS, past_end=True).tokens]
        lacks = decode._loop._scheduler.blocks.arrivals._lacks.any()
        assert lacks == (speculation == "off")
    if lacks:
        assert any(drafted.tokens for drafted in told.values())
    else:
        compare(told, plain, {3})


@contextmanager
def with_experts():
    """Experts are kept as on a GPU."""
    with patches(), patch.object(Precision, "on_gpu", True):
        yield


def check_mtp(folder: Path) -> None:
    """Layers of experts, and of latents, drafts of the checkpoint's own layer."""
    for family in MTP_FAMILIES:
        model, alone = write_model(folder / family, family)
        answers, plain = references(model), PlainMtp(model, alone)
        prompts = [PROMPTS[0], PROMPTS[1][:21]]
        options = {"max_step_tokens": 20, "max_context_tokens": 48}
        with drafting(model, "mtp", around=with_experts, **options) as (engine, told):
            runs = [submit(engine, prompt, 4, ignore_eos=True) for prompt in prompts]
            finish(*runs, timeout_s=900)
            for prompt, run in zip(prompts, runs, strict=True):
                assert run.tokens == [answers(prompt, 4, past_end=True).tokens]
        assert max(len(drafted.tokens) for drafted in told.values()) == DRAFTS
        for tokens, drafted in told.items():
            assert drafted.tokens == plain.draft(tokens, len(drafted.tokens)), (family, tokens)


def check_ranks(folder: Path) -> None:
    """Two ranks verify and draft alike, greedy and drawn: the suffix drafter, a head of its own
    few tokens, and one that shares the model's."""
    model = write_tiny_model(folder / "tiny", tokenizer=False, layers=5)
    answers = references(model)
    head = write_head(folder / "head", model)
    shared, weights = folder / "shared", load_file(head / "model.safetensors")
    own = {
        name: each for name, each in weights.items() if name not in ("lm_head.weight", "d2t", "t2d")
    }
    save_file(own, write_head(shared, model, drafted=VOCAB) / "model.safetensors")
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=5, repetition_penalty=1.2)
    with running(model, **OPTIONS) as plain_engine:
        wanted = submit(plain_engine, PROMPTS[0], 3, sampling=seeded, ignore_eos=True)
        finish(wanted)
    for speculation in (str(head), str(shared), "suffix"):
        small = {"around": on_two_ranks, "max_context_tokens": 32, "max_step_tokens": 20}
        with drafting(model, speculation, **small) as (engine, told):
            runs = [submit(engine, PROMPTS[0], 5, ignore_eos=True)]
            if speculation == str(head):
                runs.append(submit(engine, PROMPTS[0], 3, sampling=seeded, ignore_eos=True))
            finish(*runs, timeout_s=900)
            assert runs[0].tokens == [answers(PROMPTS[0], 5, past_end=True).tokens]
            assert [run.tokens for run in runs[1:]] in ([], [wanted.tokens])
            one, other = (each._drafting.tables for each in engine._loop._executor.ranks)
            for name in ("length", "next", "drafts", "ready", "history"):
                assert torch.equal(getattr(one, name)[:-1], getattr(other, name)[:-1]), name
        if speculation == str(head):
            plain = PlainHead(head, model)
            assert any(drafted.tokens for drafted in told.values())
            for tokens, drafted in told.items():
                assert drafted.tokens == plain.draft(tokens, DRAFTS).tokens[: len(drafted.tokens)]


HEADS = {"steps": check_steps, "handoff": check_handoff}
CASES = {"mtp": check_mtp, "ranks": check_ranks}


def main() -> None:
    interpreted_ptx.teach()
    folder = Path(sys.argv[1])
    model = write_tiny_model(folder / "tiny", tokenizer=False, layers=5)
    for case in sys.argv[2:]:
        if case in CASES:
            CASES[case](folder)
            print(case, "equal", flush=True)
            continue
        for form, before in (("original", False), ("speculators", True)):
            head = write_head(folder / form, model, form, norm_before_residual=before)
            HEADS[case](model, head)
        print(case, "equal", flush=True)


if __name__ == "__main__":
    main()
