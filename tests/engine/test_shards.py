"""A rank's part of a model: what it reads, what does not depend on the number of ranks, and which
numbers are refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from quantised_folders import write_quantised
from tiny_models import write_tiny_model

from engine.beams.plan import SearchPlan
from engine.model import LoadedModel, UnsupportedModelError, load_model
from engine.model.decoder import Layer
from engine.model.mixers.attention import Attention
from engine.model.region import Range
from engine.model.shard import Shard
from engine.model.sources import Safetensors
from engine.ranks.steps import COLUMNS, GROUP, decode, encode
from engine.step.plan import GroupTable, ScorePlan, StepPlan
from engine.step.sampling import SamplePlan

CPU = torch.device("cpu")
BIASES = {"attention_bias": True, "mlp_bias": True}


def load(path: Path, rank: int = 0, count: int = 1, **options) -> LoadedModel:
    more = {"dtype": torch.bfloat16, "device": CPU, "shard": Shard(rank, count), **options}
    return load_model(str(path), **more)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Four query heads, two KV heads, biases everywhere, 385 tokens: no number of ranks divides
    them."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny_model(folder, vocab=385, tokenizer=False, **BIASES)


def layer_of(loaded: LoadedModel) -> Layer:
    layer = loaded.model.layers[1]
    assert isinstance(layer, Layer)
    assert isinstance(layer.mixer, Attention)
    return layer


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
@pytest.mark.parametrize("count", [2, 4])
def test_ranks_hold_the_parts_of_one(path, count, load_format):
    """Together they have each weight once, but KV heads that several ranks need."""
    whole = layer_of(one := load(path, load_format=load_format))
    ranks = [load(path, rank, count, load_format=load_format) for rank in range(count)]
    assert {loaded.revision for loaded in ranks} == {one.revision}
    layers = [layer_of(loaded) for loaded in ranks]
    d, (heads, kv_heads, _) = whole.mixer.own.head_dim, whole.mixer.heads
    q, k, v = whole.mixer.qkv.method.weight.split([heads * d, kv_heads * d, kv_heads * d])
    for rank, layer in enumerate(layers):
        own = slice(rank * heads // count * d, (rank + 1) * heads // count * d)
        first = rank * kv_heads // count
        kv = slice(first * d, (first + max(1, kv_heads // count)) * d)
        assert torch.equal(layer.mixer.qkv.method.weight, torch.cat((q[own], k[kv], v[kv])))
    outputs = [layer.mixer.output for layer in (*layers, whole)]
    for *parts, of_one in (outputs, [layer.feed_forward.down for layer in (*layers, whole)]):
        both = torch.cat([part.method.weight for part in parts], 1)
        assert torch.equal(both, of_one.method.weight)
        assert torch.equal(parts[0].bias, of_one.bias)
        assert not any(part.bias.any() for part in parts[1:]), "a bias is added once"
    gates = [layer.feed_forward.gate_up.method.weight.chunk(2) for layer in layers]
    assert torch.equal(
        torch.cat([*(gate for gate, _ in gates), *(up for _, up in gates)]),
        whole.feed_forward.gate_up.method.weight,
    )
    assert torch.equal(torch.cat([loaded.model.head for loaded in ranks]), one.model.head)


def test_only_a_ranks_places_are_read(path, monkeypatch):
    """Of a tensor that is cut, a rank reads its part, and two rows for the revision."""
    of_tensor = Safetensors.read
    read: dict[str, int] = {}

    def watched(self, name: str, *where: Range) -> torch.Tensor:
        tensor = of_tensor(self, name, *where)
        read[name] = read.get(name, 0) + tensor.numel()
        return tensor

    monkeypatch.setattr(Safetensors, "read", watched)
    load(path, 1, 4)
    prefix = "model.layers.0."
    assert read[f"{prefix}mlp.gate_proj.weight"] == 128 * 64 // 4 + 2 * 64
    assert read[f"{prefix}mlp.down_proj.weight"] == 64 * 128 // 4 + 2 * 128
    assert read[f"{prefix}self_attn.k_proj.weight"] == 16 * 64 + 2 * 64


@pytest.mark.parametrize(
    ("options", "count", "why"),
    [
        (
            {"heads": 6, "kv_heads": 3, "hidden": 96},
            2,
            "neither divides the 3 KV.*: 1, 3, 6$",
        ),
        ({}, 3, "does not divide the 4 attention heads.*: 1, 2, 4$"),
        ({"heads": 6, "kv_heads": 2, "hidden": 96}, 6, ""),
        ({"intermediate_size": 130}, 4, "the feed-forward width 130.*: 1, 2$"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_those_that_do(tmp_path, options, count, why):
    stated = {"intermediate_size": options.pop("intermediate_size", None)}
    write_tiny_model(tmp_path, tokenizer=False, **options)
    if stated["intermediate_size"]:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **stated}))
    if not why:
        assert layer_of(load(tmp_path, 5, count)).mixer.heads == (1, 1, 1)
        return
    with pytest.raises(UnsupportedModelError, match=f"tp {count} does not fit.*{why}"):
        load(tmp_path, 0, count, check=lambda _: pytest.fail("refused too late"))


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("fp8-blocks", r"q_proj, which cannot be cut within 128 channels; these fit: 1, 2$"),
        ("gptq", r"o_proj, which cannot be cut within 32 channels; these fit: 1, 2, 4$"),
    ],
)
def test_no_block_and_no_group_is_cut(tmp_path, form, why):
    """Eight heads of 32 (blocks) or of 16 (groups of 32)."""
    hidden = 256 if form == "fp8-blocks" else 128
    shape = {"hidden": hidden, "heads": 8, "kv_heads": 8, "tokenizer": False}
    source = write_tiny_model(tmp_path / "float", **shape)
    write_quantised(source, tmp_path / form, form)
    with pytest.raises(UnsupportedModelError, match=f"it cuts model.layers.0.self_attn.{why}"):
        load(tmp_path / form, 0, 8)
    assert load(tmp_path / form, 1, 2).revision == load(tmp_path / form).revision


@pytest.mark.model
def test_ranks_read_gguf_files_alike(demo_model):
    one, *ranks = (load(demo_model, *shard) for shard in ((0, 1), (0, 3), (2, 3)))
    assert {loaded.revision for loaded in ranks} == {one.revision}
    whole, part = (
        layer_of(one).feed_forward.down.method.weight,
        layer_of(ranks[1]).feed_forward.down.method.weight,
    )
    assert torch.equal(whole[:, -part.shape[1] :], part)


@pytest.mark.parametrize("whole", [False, True])
def test_a_step_comes_over_as_it_was_sent(whole):
    rng = np.random.default_rng(0)
    some = partial(np.arange, dtype=np.int32)
    columns = {
        name: rng.integers(0, 99, size=length).astype(np.int32)
        for length, name in enumerate(COLUMNS)
    }
    columns["page_table"] = rng.integers(0, 99, (4, 7)).astype(np.int32)[:, ::2]
    columns["sample_slots"] = np.zeros(3, np.int32)
    columns["hook_tags"] = rng.integers(0, 99, (2, len(columns["row_slots"]))).astype(np.int32)
    columns["pools"] = rng.integers(0, 99, (3, 4)).astype(np.int32)
    nothing = np.zeros(0, np.int32)
    scores = tuple(ScorePlan(at, np.arange(5 + at, dtype=np.int32), at + 1) for at in (3, 9))
    more = {"sample_generations": nothing, "sample_indices": nothing, "scores": scores}
    more |= {"sample": SamplePlan(3), "whole_logits": whole}
    others = tuple(
        GroupTable(
            np.arange(4 * at, dtype=np.int32).reshape(4, at), np.full(4, at, np.int32), *copies
        )
        for at, copies in ((3, (nothing, nothing)), (1, (np.array([5, 6], np.int32),) * 2))
    )
    searches = tuple(
        SearchPlan(
            some(3), nothing, nothing, None, some(rows), pages, (some(rows), nothing, some(3))
        )
        for rows, pages in ((0, 0), (3, 5))
    )
    groups = {"others": others, "searches": searches}
    plan = StepPlan(number=7, num_decodes=2, **columns, **more, **groups)
    found = decode([bytes(frame) for frame in encode(plan)])
    for name in COLUMNS:
        assert np.array_equal(getattr(found, name), columns[name]), name
    assert (found.number, found.num_decodes, found.sample) == (7, 2, SamplePlan(3))
    assert found.whole_logits is whole
    for other, sent in zip(found.others, others, strict=True):
        for name in GROUP:
            assert np.array_equal(getattr(other, name), getattr(sent, name)), name
    for search, sent in zip(found.searches, searches, strict=True):
        assert search.followed == sent.followed
        pairs = ((search.slots, sent.slots), (search.rows, sent.rows))
        for got, want in (*pairs, *zip(search.moved, sent.moved, strict=True)):
            assert np.array_equal(got, want)
    assert [(s.first_token, s.top_n, s.next_ids.tolist()) for s in found.scores] == [
        (s.first_token, s.top_n, s.next_ids.tolist()) for s in scores
    ]
