"""Runs engines with a draft head whose steps are those of a GPU, in Triton's interpreter: drafts
and K and V of the head are those of plain PyTorch. Arguments: a scratch folder, then cases."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path

import interpreted_ptx
import numpy as np
import torch
from engine_kit import build, check_baseline, finish, hand_off, submit
from heads_kit import Drafted, PlainHead, write_head
from interpreted_executor import OPTIONS, VOCAB, patches
from references import references
from speculation_kit import Switching
from tiny_models import write_tiny_model

from engine.types import SamplingParams

DRAFTS, TOKENS = 3, 6
PROMPTS = [np.random.default_rng(size).integers(1, VOCAB, size).tolist() for size in (5, 44)]


@contextmanager
def drafting(model: Path, head: Path, widths=None, **options):
    """An engine; what its head has drafted behind all tokens of a sequence, and its K and V."""
    told: dict[tuple[int, ...], Drafted] = {}
    with patches():
        options = {**OPTIONS, "cuda_graphs": False, "speculation": str(head), **options}
        engine = build(model, draft_tokens=DRAFTS, **options)
        fused = engine._loop._executor._head
        run = fused.run

        def record(step):
            run(step)
            if (tables := fused._tables) is None:
                return
            for row in range(int(step.packed.header[0])):
                slot = int(step.packed.slots[row])
                length, ready = int(tables.length[slot]), int(tables.ready[slot])
                tokens = tuple(tables.history[slot, : length + 1].tolist())
                places = fused._pool.places(step.packed.page_table[row].long())
                k, v = (each[:, :length].transpose(0, 1) for each in fused._pool.gather(0, places))
                told[tokens] = Drafted(tables.drafts[slot, :ready].tolist(), k, v)

        fused.run = record
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
        prefill = build(model, decodes=False, cuda_graphs=False, **options)
        run = hand_off(prefill, decode, PROMPTS[1], TOKENS, ignore_eos=True)
        assert run.tokens == [answers(PROMPTS[1], TOKENS, past_end=True).tokens]
        check_baseline(prefill)
        prefill.stop()
        lacks = decode._loop._scheduler.blocks.arrivals._lacks.any()
        assert lacks == (speculation == "off")
    if lacks:
        assert any(drafted.tokens for drafted in told.values())
    else:
        compare(told, plain, {3})


CASES = {"steps": check_steps, "handoff": check_handoff}


def main() -> None:
    interpreted_ptx.teach()
    folder = Path(sys.argv[1])
    model = write_tiny_model(folder / "tiny", tokenizer=False, layers=5)
    for case in sys.argv[2:]:
        for form, before in (("original", False), ("speculators", True)):
            head = write_head(folder / form, model, form, norm_before_residual=before)
            CASES[case](model, head)
        print(case, "equal", flush=True)


if __name__ == "__main__":
    main()
