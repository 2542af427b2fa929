"""Runs whole engines whose steps are those of a GPU, in Triton's interpreter: the CUDA executor
over fused kernels, without graphs. Their tokens are those of the executor with PyTorch.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported. Arguments: a
scratch folder, then cases.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import interpreted_ptx
import numpy as np
import torch
from adapters_kit import EVERY, write_adapter
from engine_kit import GREEDY, Run, build, check_baseline, finish, hand_off, running, submit
from interpreted_kernels import convert_as_a_gpu_does
from speculation_kit import Oracle, Switching, speculating
from tiny_families import HYBRIDS
from tiny_models import write_tiny_model
from triton.runtime import interpreter

from engine.attention.grouped import Member, PagedGroups
from engine.attention.latents import LatentBackend
from engine.attention.recurrent.states import RecurrentBackend
from engine.attention.triton import TritonBackend
from engine.beams.params import BeamParams
from engine.cuda import executor as executors
from engine.cuda.adapters import kernels as adding
from engine.cuda.adapters.sites import CudaAdapterSites
from engine.cuda.decode_attention import decode_attention
from engine.cuda.kv.latent_decode import decode_latents
from engine.cuda.kv.latent_prompt import prompt_latents
from engine.cuda.kv.prompt_attention import prompt_attention
from engine.cuda.ranks import drawing
from engine.cuda.speculation import drawing as verified
from engine.cuda.steps import late
from engine.engine import Engine
from engine.loop.late import Delivery
from engine.model.adapters.sites import linears_of
from engine.model.precision.choice import Precision
from engine.parts import building
from engine.parts.heads import head_parts
from engine.pool.state_pool import StatePool
from engine.pooling.requests import Pooling, PoolKind
from engine.step.plan import StepPlan
from engine.types import Mode, SamplingParams

VOCAB = 384


def fake(*_arguments: object, **_options: object) -> Any:
    """A stream or an event of a device that runs everything at once."""
    nothing = lambda *_: None  # noqa: E731
    return SimpleNamespace(record=nothing, synchronize=nothing, wait_stream=nothing)


def attention_over(pool, specs) -> Member:
    """Attention with kernels of our own."""
    if specs[0].latents is not None:
        return LatentBackend(pool, specs, prompt_latents, decode_latents)
    return TritonBackend(pool, specs, prompt_attention, decode_attention)


def on_a_device(config, loaded, pools, sampler, hooks, progress=None):
    """`building.cuda_executor`, with attention of our own."""
    specs = loaded.model.attention_specs
    own: list[Member] = []
    for pool, layers in zip(pools, pools.held, strict=True):
        of_layers = tuple(specs[layer] for layer in layers)
        if isinstance(pool, StatePool):
            own.append(RecurrentBackend(pool, of_layers))
        else:
            own.append(attention_over(pool, of_layers))
    groups = PagedGroups(own, pools.places)
    drafting = building._drafting(config, loaded, pools.first.device)
    head = head_parts(loaded, pools, attention_over)
    parts = {"drafting": drafting, "head": head, "adapters": building.cuda_sites_of(loaded)}
    return executors.CudaExecutor(loaded.model, pools, groups, sampler, config, **parts)


def patches() -> ExitStack:
    """Until it is closed, engines run their steps so."""
    stack = ExitStack()
    for name, stand_in in (
        ("Stream", fake), ("Event", fake), ("current_stream", fake),
        ("stream", lambda _stream: nullcontext()),
    ):  # fmt: skip
        stack.enter_context(patch.object(torch.cuda, name, stand_in))
    for module in (drawing, verified):
        stack.enter_context(patch.object(module, "to_pinned", torch.clone))
    stack.enter_context(patch.object(building, "cuda_executor", on_a_device))
    return stack


OPTIONS: dict[str, Any] = {
    "num_pages": 60, "max_sequences": 4, "max_step_tokens": 64, "max_context_tokens": 128,
}  # fmt: skip
PROMPTS = [np.random.default_rng(length).integers(1, VOCAB, length).tolist() for length in (5, 40)]
PROMPTS.append([7, 8, 9] * 5 + [7])
SEEDED = SamplingParams(
    temperature=0.9, top_p=0.9, seed=5, top_logprobs=2, repetition_penalty=1.2
)  # fmt: skip
TOKENS = 9


def run(engine: Engine, sampling: SamplingParams) -> list[Run]:
    runs = [submit(engine, ids, TOKENS, sampling=sampling, ignore_eos=True) for ids in PROMPTS]
    finish(*runs, timeout_s=300)
    check_baseline(engine)
    return runs


def wanted_of(path: Path, sampling: SamplingParams) -> list[Run]:
    """What the executor with PyTorch says without drafts."""
    engine = build(path, **OPTIONS)
    try:
        return run(engine, sampling)
    finally:
        engine.stop()


def same(got: list[Run], wanted: list[Run]) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.tokens == theirs.tokens, (ours.tokens, theirs.tokens)
        for mine, other in zip(ours.records[0], theirs.records[0], strict=True):
            assert mine.top_ids == other.top_ids
            if other.logprob is not None:
                assert abs(mine.logprob - other.logprob) < 1e-3


def check_plain(path: Path) -> None:
    """Steps of a shape, and steps without one."""
    wanted = wanted_of(path, GREEDY)
    with patches(), running(path, cuda_graphs=False, **OPTIONS) as engine:
        same(run(engine, GREEDY), wanted)


def check_drafts(path: Path) -> None:
    """Drafts that are right or half right, and widths in turns, change nothing, greedy or drawn."""
    for sampling, scripts in ((GREEDY, ("right", "half")), (SEEDED, ("half",))):
        wanted, oracle = wanted_of(path, sampling), Oracle(VOCAB)
        for each in wanted:
            oracle.learn_run(each)
        for name in scripts:
            with patches():
                script, options = oracle.scripts()[name], OPTIONS | {"cuda_graphs": False}
                with speculating(path, script, Switching(), **options) as engine:
                    same(run(engine, sampling), wanted)
                    told = engine._loop._scheduler.drafts.load()
                    assert sum(told.accepted_by_position) > 3, told


def check_suffix(path: Path) -> None:
    """The drafter that is a kernel, of steps of all its tokens."""
    wanted = wanted_of(path, GREEDY)
    with patches(), speculating(path, cuda_graphs=False, draft_tokens=3, **OPTIONS) as engine:
        same(run(engine, GREEDY), wanted)


def check_pools(path: Path) -> None:
    """Hidden states of last tokens, from steps of a shape, and of all tokens, from others."""

    def pooled(engine: Engine) -> list[Any]:
        decoding = submit(engine, PROMPTS[0], TOKENS, ignore_eos=True)
        runs = [
            submit(engine, ids, 0, mode=Mode.POOL, pooling=Pooling(kind))
            for kind in PoolKind
            for ids in PROMPTS
        ]
        finish(decoding, *runs, timeout_s=300)
        check_baseline(engine)
        return [run.pooled.values for run in runs if run.pooled]

    options = OPTIONS | {"prefix_cache": False}
    with running(path, **options) as plain:
        wanted = pooled(plain)
    with patches(), running(path, cuda_graphs=False, **options) as engine:
        for mine, other in zip(pooled(engine), wanted, strict=True):
            assert abs(mine - other).max() < 1e-4


def check_beams(path: Path) -> None:
    """Searches, whose steps copy pages and write tokens; beside them one that draws, with drafts
    and without."""

    def searched(engine: Engine) -> list[Run]:
        runs = [
            submit(engine, ids, TOKENS, beams=BeamParams(3), ignore_eos=True) for ids in PROMPTS[:2]
        ]
        runs.append(submit(engine, PROMPTS[2], TOKENS, ignore_eos=True))
        finish(*runs, timeout_s=300)
        check_baseline(engine)
        assert engine.load().beam_forks > 0
        return runs

    with running(path, **OPTIONS) as plain:
        wanted = searched(plain)
    for more in ({}, {"speculation": "suffix", "draft_tokens": 3}):
        with patches(), running(path, cuda_graphs=False, **OPTIONS, **more) as engine:
            same(searched(engine), wanted)


def check_states(path: Path) -> None:
    """Prompts in chunks, beside decode rows, from the cache, and forked. Then a cached state is
    wrong."""
    options = OPTIONS | {"max_step_tokens": 72, "max_context_tokens": 256, "num_pages": 80}
    prompts = [np.random.default_rng(n).integers(1, VOCAB, n).tolist() for n in (5, 66)]

    def answered(engine: Engine) -> list[Run]:
        runs = []
        for choices in (1, 2):
            several = [submit(engine, ids, 3, choices=choices, ignore_eos=True) for ids in prompts]
            finish(*several, timeout_s=600)
            runs += several
        check_baseline(engine)
        return runs

    with running(path, **options) as plain:
        wanted = answered(plain)
    with patches(), running(path, cuda_graphs=False, **options) as engine:
        same(answered(engine), wanted)
        for layer in range(2):
            engine.pools[1].stamps(layer).add_(1)
        again = submit(engine, prompts[1], 3, ignore_eos=True)
        finish(again, timeout_s=600)
        same([again], wanted[1:2])
        assert engine.load().preemptions == 1, "it was found, and computed again"


def rounding() -> ExitStack:
    """Until it is closed, FP8 weights are kept as on a GPU."""
    stack = ExitStack()
    capability = patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    stack.enter_context(capability)
    stack.enter_context(patch.object(Precision, "on_gpu", True))
    return stack


def check_rounded(folder: Path) -> None:
    """In FP8 norms leave rows as they are, too: gates and routers read those."""
    path = write_tiny_model(folder / "rounded", tokenizer=False, **HYBRIDS["qwen3_5_moe"])
    options = OPTIONS | {"max_step_tokens": 72, "quantization": "fp8"}
    with running(path, **options) as plain:
        wanted = submit(plain, PROMPTS[0], 3, ignore_eos=True)
        finish(wanted)
    with patches(), rounding(), running(path, cuda_graphs=False, **options) as engine:
        got = submit(engine, PROMPTS[0], 3, ignore_eos=True)
        finish(got, timeout_s=600)
    same([got], [wanted])


def check_adapters(path: Path, precision: str = "") -> None:
    """Rows of three adapters for two slots and of none, in one crowd; then drafts of such rows."""
    folders = [
        write_adapter(path, path.parent / f"adapter{i}", i, r=rank, target_modules=names)
        for i, (rank, names) in enumerate(((8, EVERY), (20, ["q_proj", "down_proj"]), (16, EVERY)))
    ]
    named = tuple(f"a{i}={folder}" for i, folder in enumerate(folders))
    options = OPTIONS | {"max_adapters": 2, "max_adapter_rank": 32, "adapters": named}
    options |= {"max_context_tokens": 48, "quantization": precision}

    def answered(engine: Engine) -> list[Run]:
        digests = [*(info.digest for info in engine.adapters.named()), b""]
        runs = [
            submit(engine, ids, 3, adapter=digest, ignore_eos=True)
            for ids in (PROMPTS[0], PROMPTS[1][:20])
            for digest in digests
        ]
        finish(*runs, timeout_s=300)
        check_baseline(engine)
        return runs

    def on_a_gpu(config, loaded, _device):
        linears = linears_of(loaded.model)
        own = CudaAdapterSites(linears, config.max_adapters, 32, torch.float32)
        return replace(loaded, adapters=own)

    with running(path, **options) as plain:
        wanted = answered(plain)
    assert len({tuple(run.tokens[0]) for run in wanted[:4]}) == 4, "they differ"
    for more in ({}, {"speculation": "suffix", "draft_tokens": 3})[: 1 if precision else 2]:
        one = patch.object(adding, "_SPLITS", ())  # The interpreter is slow.
        adds = patch.object(building, "with_adapters", on_a_gpu)
        more = {"cuda_graphs": False, **options, **more}
        rounds = rounding() if precision else nullcontext()
        with patches(), one, adds, rounds, running(path, **more) as engine:
            same(answered(engine), wanted)


def check_late(path: Path) -> None:
    """Rows that come when the step is launched, before the device begins it. Of 16 tokens: the next
    one needs another page."""
    cases = [([*range(1, 17)], GREEDY), (PROMPTS[1], SEEDED)]
    plain, fused = running(path, **OPTIONS), running(path, cuda_graphs=False, **OPTIONS)
    with plain as prefill, patches(), fused as engine:
        loop, launch, coming = engine._loop, late.launch, []
        drawn: list[StepPlan] = []
        draw = loop._late._rows.draw

        def looks(*arguments: object, **options: int) -> None:
            if coming and len(loop._flights) == 2:
                assert loop._late.offers(coming.pop(), loop._flights[-1].plan)
            launch(*arguments, **options)

        loop._late._rows.draw = lambda plan: (drawn.append(plan), draw(plan))[1]
        engine.deliver = lambda *delivery: coming.append(Delivery(*delivery))
        with patch.object(late, "launch", looks):
            for ids, sampling in cases:
                beside = submit(engine, PROMPTS[0], 7, ignore_eos=True)
                got = hand_off(prefill, engine, ids, 3, sampling=sampling, ignore_eos=True)
                wanted = submit(prefill, ids, 3, sampling=sampling, ignore_eos=True)
                alone = submit(prefill, PROMPTS[0], 7, ignore_eos=True)
                finish(beside, wanted, alone, timeout_s=300)
                same([got, beside], [wanted, alone])
        assert len(drawn) == len(cases)


CASES = {
    "late": check_late, "pools": check_pools, "plain": check_plain, "drafts": check_drafts,
    "suffix": check_suffix, "beams": check_beams, "adapters": check_adapters,
}  # fmt: skip


def main() -> None:
    interpreted_ptx.teach()
    path = write_tiny_model(Path(sys.argv[1]) / "tiny", tokenizer=False)
    for case in sys.argv[2:]:
        if case in HYBRIDS:
            own = write_tiny_model(Path(sys.argv[1]) / case, tokenizer=False, **HYBRIDS[case])
            check_states(own)
        elif case == "rounded":
            interpreter._convert_float = convert_as_a_gpu_does
            check_rounded(Path(sys.argv[1]))
        elif case == "adapters-fp8":
            interpreter._convert_float = convert_as_a_gpu_does
            check_adapters(path, "fp8")
        else:
            CASES[case](path)
        print(case, "equal", flush=True)


if __name__ == "__main__":
    main()
