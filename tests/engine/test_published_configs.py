"""Configs as checkpoints publish them, by their numbers. No weights are read.

`published.json` has one checkpoint a line, with what the engine and the model's class read of its
config, without tokens' ids, dropouts and towers. `source` says where its numbers are from, `read`
what is read, `billions` the weights of the text part by the card; `refused` the class that has no
file here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from console.doctor.model import weights_of
from engine.model import ModelConfig, ModelError, UnsupportedModelError
from engine.model.families import FAMILIES, REASONS, read_config
from engine.model.mixers.config import AttentionConfig, LatentConfig, MambaConfig, ShortConvConfig

PUBLISHED: dict[str, dict[str, Any]] = {
    each["name"]: each
    for each in json.loads(Path(__file__).with_name("published.json").read_text())
}
READ = [name for name, each in PUBLISHED.items() if "read" in each]
BESIDE = (
    *("visual", "vision", "audio", "projector"),
    *("inv_freq", "embed_scale", "correction_bias", "expert_bias", "moe_statics"),
)
"""What is no weight of the text part in the model's dtype."""


def described(config: ModelConfig) -> str:
    attention = [own for own in config.mixers if isinstance(own, AttentionConfig)]
    latent = [own for own in config.mixers if isinstance(own, LatentConfig)]
    shapes = dict.fromkeys((own.heads, own.kv_heads, own.head_dim) for own in attention)
    parts = [f"{config.num_layers} layers", *("{}/{} heads of {}".format(*each) for each in shapes)]
    parts += dict.fromkeys(f"{own.heads} heads over {own.rank} + {own.turned}" for own in latent)
    counts = {
        "windows": sum(own.window is not None for own in attention),
        "convolutions": sum(isinstance(own, ShortConvConfig) for own in config.mixers),
        "states": sum(bool(kept.state) for kept in config.keepers.values()),
        "that share KV": sum(own.kv_from is not None for own in attention),
    }
    parts += [f"{count} {what}" for what, count in counts.items() if count]
    forwards = [getattr(each.feed_forward, "experts", each.feed_forward) for each in config.layers]
    if found := [own.routing.experts for own in forwards if hasattr(own, "routing")]:
        parts.append(f"{len(found)} x {found[0]} experts")
    return ", ".join(parts)


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_forty_of_them_are_of_this_year():
    assert sum(each["year"] == 2026 for each in PUBLISHED.values()) >= 40


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_or_refused_by_name(name, tmp_path):
    own = PUBLISHED[name]
    folder = written(tmp_path, own["config"])
    if "read" in own:
        assert described(read_config(folder)) == own["read"]
        return
    why = re.escape(REASONS.get(own["config"]["model_type"], ""))
    refusal = f"{own['refused']} .* has no file in engine/model/families{why}; those"
    with pytest.raises(UnsupportedModelError, match=refusal):
        read_config(folder)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", READ)
def test_as_many_weights_are_read_as_transformers_has_and_the_card_says(name, tmp_path):
    own = PUBLISHED[name]
    folder = written(tmp_path, as_transformers_reads(own["config"]))
    weights = weights_of(str(folder), torch.bfloat16, torch.device("cpu"))
    config = read_config(folder)
    in_float32 = weights.packed_bytes // 4 - choice_biases(config)
    count = weights.count + in_float32 - repeated(config)
    assert count == count_of_transformers(folder)
    if own["billions"]:
        assert weights.count / 1e9 == pytest.approx(own["billions"], rel=0.04)


def choice_biases(config: ModelConfig) -> int:
    """Numbers that transformers has as buffers."""
    forwards = [getattr(each.feed_forward, "experts", each.feed_forward) for each in config.layers]
    how = [own.routing for own in forwards if hasattr(own, "routing")]
    return sum(each.experts for each in how if each.bias)


def repeated(config: ModelConfig) -> int:
    """Weights of Mamba's convolutions that several units of a group have."""
    found = [own for own in config.mixers if isinstance(own, MambaConfig)]
    return sum(
        (own.units - own.groups) * 2 * own.state_dim * (own.kernel + own.conv_bias) for own in found
    )


def as_transformers_reads(config: dict[str, Any]) -> dict[str, Any]:
    """In floats, and by a class of its own."""
    own = {k: v for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    return own | {"model_type": FAMILIES[config["model_type"]].reads_as or config["model_type"]}


def count_of_transformers(folder: Path) -> int:
    config = AutoConfig.from_pretrained(folder)
    has_images = hasattr(config, "vision_config")
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    return sum(
        weight.numel()
        for name, weight in (*model.named_parameters(), *model.named_buffers())
        if not any(each in name for each in BESIDE)
    )


def test_every_class_of_transformers_is_read_or_refused_by_name(tmp_path):
    """With the numbers that its config has by itself."""
    from transformers.models.auto import modeling_auto

    names = {
        **modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    assert len(names) > 200
    read, without, refusals = set(), set(), {}
    for model_type, stated in names.items():
        name = stated if isinstance(stated, str) else stated[0]
        name = FAMILIES[model_type].architecture if model_type in FAMILIES else name
        config = {"model_type": model_type, "architectures": [name]}
        try:
            read_config(written(tmp_path, config))
            read.add(model_type)
        except UnsupportedModelError as refused:
            refusals[name] = str(refused)
        except ModelError:
            without.add(model_type)
    assert [name for name, words in refusals.items() if name not in words] == []
    assert without == {"deepseek_v2", "dots1", "granitemoehybrid", "lfm2_moe"}, (
        "what they have by themselves is no model"
    )
    assert read == (FAMILIES.keys() & names.keys()) - without
    assert "pages have no place for the index's keys" in refusals["DeepseekV32ForCausalLM"]
