"""Adapters on a GPU: graphs with rows of several and of none, against the reference on the CPU."""

from __future__ import annotations

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

pytestmark = pytest.mark.gpu
NEW = 12
NAMED = ({"r": 8}, {"r": 40}, {"r": 16, "target_modules": ["q_proj", "down_proj"]})
ROUNDED = {"dtype": "bfloat16", "turned": 4, "first": 2}
"""Near ties turn in 16 bits, so rows are compared by their first tokens."""
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]


def answered(path: Path, folders: list[Path], *, fused: bool, **options: Any) -> list:
    """Tokens of a crowd: more adapters than slots; prompts of a graph, and long ones."""
    named = tuple(f"a{i}={folder}" for i, folder in enumerate(folders))
    own = {"num_pages": 400, "max_step_tokens": 640, "max_adapters": 2, "adapters": named}
    engine = build(path, **own | options)
    try:
        executor = engine._loop._executor
        executor = getattr(executor, "_own", executor)
        assert (type(executor).__name__ == "CudaExecutor") == fused
        if fused:
            assert bool(executor._graphs) == options.get("cuda_graphs", True)
        digests = [*(info.digest for info in engine.adapters.named()), b""]
        runs = [
            submit(engine, prompt_of(length), NEW, adapter=digest, ignore_eos=True)
            for length in (5, 70, 300, 600)
            for digest in digests
        ]
        finish(*runs, timeout_s=120)
        check_baseline(engine)
        return [run.tokens for run in runs]
    finally:
        engine.stop()


def check(
    path: Path, folders: list[Path], turned: int = 1, first: int = NEW, **options: Any
) -> None:
    """On a GPU as on a CPU. `turned`: rows where a near tie may turn a token of the `first`."""
    fused = options.pop("fused", True)
    shared = {"dtype": "float32", **{k: v for k, v in options.items() if k in SHARED}}
    wanted = answered(path, folders, fused=False, device="cpu", **shared)
    found = answered(path, folders, fused=fused, device="cuda", **shared | options)
    pairs = zip(found, wanted, strict=True)
    same = sum(one[0][:first] == other[0][:first] for one, other in pairs)
    assert same >= len(wanted) - turned, f"{same} of {len(wanted)}"
    assert len({str(tokens) for tokens in wanted[: len(folders) + 1]}) == len(folders) + 1


SHARED = ("dtype", "model_impl", "quantization", "kv_cache_dtype")
KINDS: dict[str, dict[str, Any]] = {
    "graphs": ROUNDED,
    "no-graphs": ROUNDED | {"cuda_graphs": False},
    "suffix": ROUNDED | {"speculation": "suffix"},
    "eager": {"attention": "sdpa", "fused": False},
    "fp8-kv": ROUNDED | {"kv_cache_dtype": "fp8"},
}


@pytest.fixture
def three(tmp_path):
    path = write_tiny_model(tmp_path / "tiny", tokenizer=False, head_dim=32)
    return path, [write_adapter(path, tmp_path / str(i), i, **own) for i, own in enumerate(NAMED)]


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_answers_as_a_cpu(kind, impl, three):
    check(*three, model_impl=impl, **KINDS[kind])


@pytest.mark.parametrize("precision", ["fp8", "compressed-tensors-blocks", "pack-quantized-group"])
def test_quantised_bases(precision, tmp_path):
    """Their products read what is rounded, and pairs what is not. 16 bits turn near ties."""
    sizes = {"hidden": 128, "head_dim": 32}
    path = write_tiny_model(tmp_path / "tiny", tokenizer=False, **sizes)
    folders = [write_adapter(path, tmp_path / str(i), i, **own) for i, own in enumerate(NAMED)]
    options: dict[str, Any] = dict(ROUNDED)
    if precision == "fp8":
        options["quantization"] = "fp8"
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
    check(path, [folder], **ROUNDED)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("precision", ["", "fp8"])
def test_ranks(precision, three):
    check(*three, tp=2, **ROUNDED | {"quantization": precision})
