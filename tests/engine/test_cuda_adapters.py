"""Adapters on a GPU: graphs with rows of several and of none, against the reference on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_kit import EVERY, write_adapter
from engine_kit import build, check_baseline, finish, submit
from paths_kit import prompt_of
from quantised_folders import write_quantised
from tiny_families import EXPERTS, HYBRIDS, LATENTS
from tiny_models import write_tiny_model

from engine.engine import Engine
from engine.types import SamplingParams

pytestmark = pytest.mark.gpu
NEW = 12
LENGTHS = (5, 70, 300, 600)
NAMED = ({"r": 8}, {"r": 40}, {"r": 16, "target_modules": ["q_proj", "down_proj"]})
SCORED = SamplingParams(temperature=0.0, top_logprobs=0)
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]


def engine_of(path: Path, folders: list[Path], **options: Any) -> Engine:
    """More adapters than slots; prompts of a graph, and long ones."""
    named = tuple(f"a{i}={folder}" for i, folder in enumerate(folders))
    own = {"num_pages": 400, "max_step_tokens": 640, "max_adapters": 2, "adapters": named}
    return build(path, **own | options)


def answered(
    path: Path, folders: list[Path], *, fused: bool, **options: Any
) -> list[tuple[list[int], torch.Tensor]]:
    """Of a crowd: prompts with what was answered, and the log probabilities of that."""
    engine = engine_of(path, folders, device="cuda", **options)
    try:
        executor = engine._loop._executor
        executor = getattr(executor, "_own", executor)
        assert (type(executor).__name__ == "CudaExecutor") == fused
        if fused:
            assert bool(executor._graphs) == options.get("cuda_graphs", True)
        digests = [*(info.digest for info in engine.adapters.named()), b""]
        common = {"sampling": SCORED, "ignore_eos": True}
        runs = [
            submit(engine, prompt_of(length), NEW, adapter=digest, **common)
            for length in LENGTHS
            for digest in digests
        ]
        finish(*runs, timeout_s=120)
        check_baseline(engine)
        return [
            (
                [*run.request.prompt_ids.tolist(), *run.tokens[0]],
                torch.tensor([record.logprob for record in run.records[0]]),
            )
            for run in runs
        ]
    finally:
        engine.stop()


def scored(
    path: Path, folders: list[Path], prompts: list[list[int]], **options: Any
) -> list[torch.Tensor]:
    """The log probabilities of the last tokens of such prompts, on the CPU."""
    engine = engine_of(path, folders, device="cpu", **options)
    try:
        digests = [*(info.digest for info in engine.adapters.named()), b""]
        common = {"sampling": SCORED, "ignore_eos": True, "prompt_logprobs": True}
        runs = [
            submit(engine, prompt, 1, adapter=digests[at % len(digests)], **common)
            for at, prompt in enumerate(prompts)
        ]
        finish(*runs, timeout_s=120)
        records = [run.scored.records[-NEW:] for run in runs if run.scored is not None]
        return [torch.tensor([record.logprob for record in own]) for own in records]
    finally:
        engine.stop()


def check(path: Path, folders: list[Path], *, fused: bool = True, **options: Any) -> None:
    """A GPU is as near to float32 on the CPU as the CPU is in 16 bits. Of another adapter, log
    probabilities differ by more than 3 in each row; here they differ by 0.06, in FP8 by 0.3."""
    ours = answered(path, folders, fused=fused, **{"dtype": "bfloat16"} | options)
    whole = [tokens for tokens, _ in ours]
    shared = {k: v for k, v in options.items() if k in ("model_impl", "quantization")}
    wanted = scored(path, folders, whole, **shared, dtype="float32")
    own = {k: v for k, v in options.items() if k == "kv_cache_dtype"}
    others = scored(path, folders, whole, **shared, **own, dtype="bfloat16")
    errors = torch.stack(
        [(found - want).abs() for (_, found), want in zip(ours, wanted, strict=True)]
    )
    pairs = zip(others, wanted, strict=True)
    bound = torch.stack([(found - want).abs() for found, want in pairs]).mean()
    assert errors.mean() <= 1.6 * bound + 2e-3, (float(errors.mean()), float(bound))
    by_row = errors.mean(dim=1)
    assert (by_row <= 4 * bound + 2e-3).all(), (by_row.tolist(), float(bound))


KINDS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "no-graphs": {"cuda_graphs": False},
    "suffix": {"speculation": "suffix"},
    "eager": {"attention": "sdpa", "fused": False, "dtype": "float32"},
    "fp8-kv": {"kv_cache_dtype": "fp8"},
}


@pytest.fixture
def three(tmp_path, request):
    """A model with heads of this size, and adapters."""
    path = write_tiny_model(tmp_path / "tiny", tokenizer=False, head_dim=request.param)
    return path, [write_adapter(path, tmp_path / str(i), i, **own) for i, own in enumerate(NAMED)]


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize(
    ("kind", "three"),
    [(kind, 64 if kind == "fp8-kv" else 32) for kind in KINDS],  # FP8 KV needs FlashAttention-3.
    indirect=["three"],
)
def test_a_gpu_answers_as_a_cpu(kind, impl, three):
    check(*three, model_impl=impl, **KINDS[kind])


@pytest.mark.parametrize("precision", ["fp8", "compressed-tensors-blocks", "pack-quantized-group"])
def test_quantised_bases(precision, tmp_path):
    """Their products read what is rounded, and pairs what is not."""
    sizes = {"hidden": 128, "head_dim": 32}
    path = write_tiny_model(tmp_path / "tiny", tokenizer=False, **sizes)
    folders = [write_adapter(path, tmp_path / str(i), i, **own) for i, own in enumerate(NAMED)]
    options: dict[str, Any] = {}
    if precision == "fp8":
        options["quantization"] = "fp8"
    elif precision.startswith("pack") and find_spec("humming") is None:
        pytest.skip("humming-kernels is not installed")
    else:
        write_quantised(path, tmp_path / "quantised", precision)
        path = tmp_path / "quantised"
    check(path, folders, **options)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("deepseek_v3", LATENT),
        ("qwen3_moe", EVERY[:4]),
        ("qwen3_5_moe", EVERY[:4]),
    ],
)
def test_latents_states_and_mixtures(family, targets, tmp_path):
    own = (EXPERTS | HYBRIDS | LATENTS)[family]
    path = write_tiny_model(tmp_path / "tiny", tokenizer=False, **own)
    folder = write_adapter(path, tmp_path / "adapter", target_modules=targets)
    check(path, [folder])


def test_a_slot_keeps_nothing_of_the_adapter_before():
    """Products of its A overflow, and the next one has smaller ranks, and none for a part."""
    from interpreted_adapters import BUFFERS, Plan, adapter, former, linear

    from engine.cuda.adapters.sites import CudaAdapterSites
    from engine.cuda.steps.shapes import Shape

    sizes, inputs, dtype, device = [96, 32, 32], 128, torch.bfloat16, torch.device("cuda")
    own, next_one = linear(sizes, inputs, dtype, device), adapter(1, sizes, inputs, [8, 0, 16])
    sites = CudaAdapterSites([own], 2, 40, dtype)
    sites.reserve(600, 600, BUFFERS)
    sites.load(((1, former(7, sizes, inputs)),))
    sites.load(((0, next_one), (1, next_one)))
    for rows in (1, 20, 600):  # Kernels of one row, of few and of many.
        x, found = torch.randn(rows, inputs, device=device).to(dtype), []
        for slot in (0, 1):
            plan = Plan([slot] * rows, [1] * rows, rows)
            sites.pack(plan, Shape(rows, adapted=True))  # type: ignore[arg-type]
            found.append(own(x))
        assert found[0].isfinite().all()
        assert found[0].equal(found[1])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("three", [32], indirect=True)
@pytest.mark.parametrize("precision", ["", "fp8"])
def test_ranks(precision, three):
    check(*three, tp=2, quantization=precision)
