"""Where weights come from: shards, GGUF, and what is said when they do not fit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny_model

from engine.model import LoadedModel, ModelError, load_model

CPU = torch.device("cpu")


def load(path, **options) -> LoadedModel:
    return load_model(str(path), dtype=torch.float32, device=CPU, **options)


def same_weights(a: LoadedModel, b: LoadedModel) -> bool:
    pairs = zip(a.model.parameters(), b.model.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def split_into_shards(path, count=3):
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for shard in range(count):
        names = sorted(tensors)[shard::count]
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_hold_what_one_file_held(tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False)
    whole = load(path)
    split_into_shards(path)
    calls = []
    sharded = load(path, progress=lambda *call: calls.append(call))
    assert same_weights(whole, sharded)
    assert whole.revision == sharded.revision
    names = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    assert calls[-1][1:] == (len(calls), len(names))


def test_a_missing_shard_is_named(tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False)
    split_into_shards(path)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00003"):
        load(path)


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False)
    file = path / "model.safetensors"
    tensors = load_file(file)
    renamed = dict(tensors)
    renamed["model.layers.7.extra"] = renamed.pop("model.layers.1.mlp.down_proj.weight").clone()
    save_file(renamed, file)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj.*layers\.7\.extra"):
        load(path)
    save_file({**tensors, "model.norm.weight": torch.ones(3)}, file)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[3\]"):
        load(path)


def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(ModelError, match="config"):
        load(tmp_path)
    path = write_tiny_model(tmp_path / "m", tokenizer=False)
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors"):
        load(path)
    with pytest.raises(ModelError, match="load format"):
        load(path, load_format="pickle")
