"""Where a checkpoint is looked for, and which of its files count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_model

from engine.model import LoadedModel, ModelError, UnsupportedModelError, load_model
from engine.model.sources import DUMMY_STD

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", tokenizer=False)


def load(path: Path | str, dtype: torch.dtype = torch.float32, **options: Any) -> LoadedModel:
    return load_model(str(path), dtype=dtype, device=CPU, **options)


def test_the_same_weights_under_another_name_are_left_alone(folder):
    want = load(folder).revision
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    assert load(folder).revision == want


def test_a_single_file_may_have_any_name(folder):
    want = load(folder).revision
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert load(folder).revision == want


def test_precision_in_files_and_in_memory_may_differ(folder):
    exact = load_file(folder / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in exact.items()}, folder / "model.safetensors")
    for dtype in (torch.float32, torch.float16):
        head = load(folder, dtype).model.head
        assert head.dtype == dtype
        assert torch.equal(head, exact["lm_head.weight"].bfloat16().to(dtype))


def test_quantised_tensors_are_refused_by_name(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"up_proj\.weight is torch\.int8; this model has"
    ):
        load(folder)


def test_damaged_files_are_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        load(folder)
    file.unlink()  # It would come before an index.
    for index in ("{}", "[]", '{"weight_map": []}'):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ModelError, match=r"index\.json"):
            load(folder)


def test_tensors_that_the_engine_computes_itself_may_be_there(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    load(folder)
    tied = write_tiny_model(tmp_path / "tied", tokenizer=False, tie_word_embeddings=True)
    want = load(tied)
    tensors = load_file(tied / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tied / "model.safetensors")
    assert load(tied).revision == want.revision
    assert want.model.head is want.model.embedding


def test_the_revision_follows_config_and_weights_but_not_precision(folder, tmp_path):
    one = load(folder).revision
    assert one == load(folder, torch.bfloat16).revision
    assert len(one) == 16
    assert one != load(write_tiny_model(tmp_path / "b", tokenizer=False, seed=1)).revision
    assert one != load(write_tiny_model(tmp_path / "c", tokenizer=False, rms_norm_eps=0.1)).revision


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_dummy_weights_are_small_and_need_a_config_only(seed, folder):
    (folder / "model.safetensors").unlink()
    model = load(folder, load_format="dummy", seed=seed).model
    assert model.head.std().item() == pytest.approx(DUMMY_STD, rel=0.1)
    assert model.norm.weight.eq(1).all()
    first, second = (layer.mixer.qkv.method.weight for layer in model.layers)
    assert not torch.equal(first, second)


def test_a_whole_file_comes_before_an_index(folder):
    want = load(folder).revision
    zeros = {n: torch.zeros_like(t) for n, t in load_file(folder / "model.safetensors").items()}
    save_file(zeros, folder / "stale.safetensors")
    index = {"weight_map": dict.fromkeys(zeros, "stale.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(folder).revision == want


@pytest.mark.parametrize(("head", "kept"), [("another", False), ("alone", True)])
def test_a_tied_config_with_a_head_in_the_checkpoint(tmp_path, head, kept):
    path = write_tiny_model(tmp_path, tokenizer=False, tie_word_embeddings=True)
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = (
        embedding.flip(0).contiguous() if head == "another" else embedding.clone()
    )
    if head == "alone":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors")
    found = load(path)
    assert found.config.tie_embeddings is kept
    assert torch.equal(found.model.embedding, embedding)
    assert torch.equal(found.model.head, tensors["lm_head.weight"])
