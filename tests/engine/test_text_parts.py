"""Checkpoints that have more than a model of text: their text part is read, and nothing else."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_logits import Runner, load, reference
from tiny_families import EVERY
from tiny_models import write_tiny_model

from engine.model import ModelError, UnsupportedModelError

IDS = list(range(3, 43))


def rewritten(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("case", "towers"), [("glm4v_moe", "model.visual."), ("mistral3", "vision_tower.")]
)
def test_towers_are_not_read_and_the_log_says_so(case, towers, tmp_path, caplog):
    path = write_tiny_model(tmp_path, tokenizer=False, **EVERY[case])
    with caplog.at_level(logging.INFO, "baton.engine"):
        with_towers = load(path)
    assert any(f"images ({towers}*)" in line for line in caplog.messages), caplog.messages

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(towers)]:
            del tensors[name]

    rewritten(path, cut)
    assert load(path).revision == with_towers.revision


def test_names_of_both_forms_are_one_model(tmp_path):
    """As Gemma 3 was published, and as transformers names it inside."""
    path = write_tiny_model(tmp_path, tokenizer=False, **EVERY["gemma3_images"])
    want = Runner(load(path)).step([(0, IDS)])[0]

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            new = name.replace("language_model.model.", "model.language_model.")
            tensors[new if new != name else f"model.{name}"] = tensors.pop(name)

    rewritten(path, rename)
    assert torch.equal(Runner(load(path)).step([(0, IDS)])[0], want)
    torch.testing.assert_close(want, reference(path, IDS), atol=1e-4, rtol=1e-4)


def test_draft_layers_are_not_read_and_the_log_says_so(tmp_path, caplog):
    path = write_tiny_model(tmp_path, tokenizer=False, **EVERY["glm4_moe"])
    revision = load(path).revision
    layers = EVERY["glm4_moe"]["layers"]
    draft = {"model.layers.{}.eh_proj.weight": torch.ones(64, 128)}
    rewritten(path, lambda ts: ts.update({n.format(layers): t for n, t in draft.items()}))
    with caplog.at_level(logging.INFO, "baton.engine"):
        assert load(path).revision == revision
    assert f"1 tensors are not read: draft layers (model.layers.{layers}.*)" in caplog.messages
    rewritten(path, lambda ts: ts.update({n.format(layers + 1): t for n, t in draft.items()}))
    with pytest.raises(ModelError, match=f"1 unknown .model.layers.{layers + 1}.eh_proj"):
        load(path)


def test_other_tensors_are_refused_as_ever(tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **EVERY["qwen3_vl"])
    rewritten(path, lambda tensors: tensors.update({"model.adapter.weight": torch.ones(2)}))
    with pytest.raises(ModelError, match=r"unknown .model\.adapter\.weight"):
        load(path)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        (7, ModelError, "text_config of config.json is no object"),
        ({"num_hidden_layers": 10**9}, ModelError, "num_hidden_layers is 1000000000"),
        ({"head_dim": [16, 32]}, UnsupportedModelError, "KV shapes that differ by layer"),
        (
            {"model_type": "llama"},
            UnsupportedModelError,
            "Mistral3.*text part is a llama; supported are mistral, ministral3",
        ),
    ],
)
def test_a_text_part_that_cannot_be_is_named(text, error, words, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **EVERY["mistral3"])
    config = json.loads((path / "config.json").read_text())
    config["text_config"] = config["text_config"] | text if isinstance(text, dict) else text
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        load(path)
