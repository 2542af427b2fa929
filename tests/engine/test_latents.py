"""Attention over latents: one page for all heads, on every path of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine_kit import build, finish, running, submit
from paths_kit import Pair, check_crowd, check_every_path, prompt_of, two_engines
from quantised_folders import write_quantised
from references import references
from test_attention import Row, make_batch, written_out
from test_model_logits import load
from test_tiers_stores import COUNT, SMALL, conversations
from tiny_families import LATENTS
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.attention import AttentionError, choose_backend
from engine.config import EngineConfig
from engine.cuda.attention_kernels import CudaKernels
from engine.model import ModelError, UnsupportedModelError
from engine.model.families import read_config
from engine.parts.paging import EngineError, check_groups
from engine.pool.latent_pool import LatentPool
from engine.step.attention import AttentionSpec, Latents

LATENT, TURNED = 32, 8
SLOW = (1, 15, 16, 17, 64, 300)
LENGTHS = [65, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]
PAGE_BYTES = 16 * 3 * (LATENT + TURNED) * 4
"""16 tokens, three layers, float32."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        name: write_tiny_model(tmp_path_factory.mktemp(name), tokenizer=False, **options)
        for name, options in LATENTS.items()
    }


@pytest.fixture(scope="module")
def path(folders) -> Path:
    return folders["deepseek_v3"]


@pytest.fixture(scope="module")
def engines(path) -> Iterator[Pair]:
    with two_engines(path) as both:
        yield both


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_in_chunks_cached_forked_resumed_and_handed_off(engines, path, length):
    assert [pool.page_bytes for pool in engines[0].pools] == [PAGE_BYTES]
    check_every_path(engines, path, length)


@pytest.mark.parametrize("host", [0, 1 << 22])
def test_preempted_and_swapped(host, path):
    check_crowd(path, num_pages=26, kv_host_bytes=host)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.usefixtures("no_hurry")
def test_every_rank_has_the_whole_latent_and_some_heads(count, path, tmp_path):
    """What several ranks have stored, one rank reads."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length")
    options: dict[str, Any] = SMALL | {
        "kv_stores": (f"dir:{tmp_path}/kv?gib=0.1",), "kv_secret_file": str(secret)
    }  # fmt: skip
    prompts = conversations(COUNT)
    for ranks in (count, 1):
        options["kv_host_bytes"] = SMALL["kv_host_bytes"] * ranks
        with running(path, tp=ranks, **options) as engine:
            assert engine.pools.first.page_bytes == 4 * PAGE_BYTES
            for prompt in prompts:
                run = submit(engine, prompt, 5, ignore_eos=True)
                finish(run)
                references(path).check(run, 5)
            wait_until(lambda engine=engine: engine.load().tiers.held_slots == 0)
    assert engine.load().tiers.loaded_tokens["dir"] >= 256


@pytest.mark.slow
def test_quantised_weights_are_those_of_one_rank(tmp_path):
    """What makes K and V is widened, by heads; other weights are cut as they are."""
    shape = {"hidden": 256, "q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 32}
    source = write_tiny_model(
        tmp_path / "float", tokenizer=False, **(LATENTS["deepseek_v3"] | shape)
    )
    checkpoint = write_quantised(source, tmp_path / "int4", "pack-quantized-group")
    assert any(name.endswith("kv_b_proj") for name in checkpoint.weights)
    found = []
    for ranks in (1, 2):
        with running(tmp_path / "int4", tp=ranks) as engine:
            runs = [
                submit(engine, prompt_of(length), 12, ignore_eos=True) for length in (5, 40, 100)
            ]
            finish(*runs)
            found.append([run.tokens for run in runs])
    assert found[0] == found[1]


# -- attention alone ----------------------------------------------------------------------------


class Shape(NamedTuple):
    heads: int
    rank: int
    made: int
    turned: int
    values: int


@pytest.mark.parametrize("size", [4, 16])
@pytest.mark.parametrize("shape", [Shape(3, 24, 8, 4, 12), Shape(4, 16, 16, 8, 4)])
def test_decode_rows_and_prompts_equal_heads_written_out(shape, size):
    """Absorbed or expanded, it is attention over K and V that each head makes of the latents."""
    torch.manual_seed(0)
    heads, rank, made, turned, values = shape
    weight = torch.randn(heads, made + values, rank) / rank**0.5
    spec = AttentionSpec(0.3, latents=Latents(weight, made))
    pool = LatentPool(
        values=rank, num_pages=96, num_layers=2, num_kv_heads=1, head_dim=rank + turned,
        page_size=size, dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    pool.elements.fill_(3e4)
    rows = [Row(1, 1), Row(1, 37), Row(9, 9), Row(7, 40), Row(1, 5)][:4]
    batch = make_batch(rows, size, np.random.default_rng(1), decodes=2)
    contexts = [torch.randn(row.context, rank + turned) for row in rows]
    for context, row, table in zip(contexts, rows, batch.page_table, strict=True):
        for at, latent in enumerate(context[: row.context - row.new]):
            pool.layer(1)[0][table[at // size], 0, at % size] = latent
    q = torch.randn(sum(row.new for row in rows), heads, made + turned)
    k = torch.cat([c[-row.new :] for c, row in zip(contexts, rows, strict=True)])[:, None]
    backend = choose_backend("auto", pool, (spec, spec), CudaKernels())
    assert backend.name == "sdpa"
    backend.begin(batch)
    found = backend(1, q, k, k[..., :rank])
    for context, row, own, out in zip(
        contexts,
        rows,
        q.split([row.new for row in rows]),
        found.split([row.new for row in rows]),
        strict=True,
    ):
        both = torch.einsum("lc,hmc->lhm", context[:, :rank], weight)
        shared = context[:, None, rank:].expand(-1, heads, -1)
        keys, v = torch.cat((both[..., :made], shared), dim=-1), both[..., made:]
        padded = torch.nn.functional.pad(v, (0, made + turned - values))
        want = written_out(own, keys, padded, spec)[..., :values]
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
        stored = pool.layer(1)[0]
        table = batch.page_table[rows.index(row)]
        for at in range(row.context):
            assert torch.equal(stored[table[at // size], 0, at % size], context[at])


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8 cannot be set: all heads .* one latent"),
        ({"tp": 3}, "it does not divide the 4 attention heads; these fit: 1, 2, 4"),
    ],
)
def test_what_does_not_go_with_latents_is_named(options, words, path):
    with pytest.raises((EngineError, UnsupportedModelError), match=words):
        build(path, **options)


def test_hooks_are_refused(path):
    with pytest.raises(EngineError, match="hooks are set: they see K and V of heads"):
        check_groups(EngineConfig(model=str(path), hooks=("any",)), load(path))


def test_a_kernel_that_reads_no_latents_says_so(path):
    with pytest.raises((EngineError, AttentionError), match="it does not read latents"):
        build(path, attention="fa2")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "pairs"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "the latent of K and V is 0"),
        ("deepseek_v3", {"kv_lora_rank": 10**12}, "the latent of K and V is 1000000000000"),
        ("deepseek_v3", {"v_head_dim": 10**9}, "V of a head is 1000000000"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func softmax; it is sigmoid"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method greedy"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method noaux_tc"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"attention_bias": True}, "attention_bias without a latent of queries"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "odd", "sparse"]}, "mlp_layer_types"),
    ],
)
def test_what_cannot_be_is_named_before_weights_are_read(family, changes, words, folders, tmp_path):
    config = json.loads((folders[family] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=words):
        load(tmp_path, model_impl="native")


def test_kimi_k2_is_deepseek_v3_by_another_name(path, tmp_path):
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "own_code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == read_config(path)
