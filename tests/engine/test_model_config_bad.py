"""Configs that mean nothing: refused by class and reason before weights are read, in no time and
with no memory, whatever a file says."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_model_config import LLAMA, QWEN2
from tiny_families import EVERY

from engine.checkpoints import Weights
from engine.model import ModelError, load_model
from engine.model.families import FAMILIES, read_config

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 2048,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
PLAIN = {name: {"family": name} for name in ("llama", "mistral", "qwen2", "qwen3")}
QUICK = "gpt_oss"
"""Experts, windows, yarn."""
VALUES = (
    None, 0, -1, 1, 3, 10**6, 10**12, 0.5, -2.0, float("inf"), "x", [], [1], {}, {"a": 1}, True,
)  # fmt: skip
FEW_VALUES = (-1, 10**12, float("inf"), "x", {"a": 1})
NOT_READ = {"architectures", "model_type", "dtype"}


class CountedError(Exception):
    """The weights are counted: reading begins next."""


def count(_weights: Weights) -> None:
    raise CountedError


def load(folder: Path) -> None:
    """Loads until weights would be read."""
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "load_format": "dummy"}
    with pytest.raises(CountedError):
        load_model(str(folder), check=count, **options)


def stated(name: str) -> dict[str, Any]:
    """The whole config of a tiny model."""
    from transformers import AutoConfig

    options = dict({**PLAIN, **EVERY}[name])
    family = options.pop("family")
    if "layers" in options:
        options["num_hidden_layers"] = options.pop("layers")
    config = AutoConfig.for_model(family, **{**TINY, **options})
    whole: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return whole | {"architectures": [FAMILIES[family].architecture]}


def places(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        if not above and key in NOT_READ:
            continue
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == QUICK else pytest.mark.slow)
        for name in (*PLAIN, *EVERY)
    ],
)
def test_no_value_of_any_option_does_more_than_being_refused(name, tmp_path):
    config = stated(name)
    refused = 0
    for place in places(config):
        for value in FEW_VALUES if name == QUICK else VALUES:
            changed = copy.deepcopy(config)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = value
            (tmp_path / "config.json").write_text(json.dumps(changed))
            try:
                load(tmp_path)
            except ModelError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{'.'.join(place)} {value!r}") from error
    assert refused > 50


MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2_MOE = QWEN2 | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it can be 1 to"),
        (MIXTRAL, {"num_local_experts": 10**9}, "num_local_experts is 1000000000"),
        (
            MIXTRAL,
            {"num_local_experts": 1 << 12, "num_hidden_layers": 100},
            "num_local_experts is 4096 in 100 layers",
        ),
        (LLAMA, {"head_dim": 10**10}, "width of a head is 10000000000"),
        (LLAMA, {"vocab_size": 10**10}, "the vocabulary is 10000000000"),
        (LLAMA, {"num_attention_heads": 0}, "config"),
        (LLAMA, {"num_key_value_heads": 3}, "4 heads do not share 3 KV heads"),
        (
            QWEN2,
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "pairs of numbers, and a head has 21",
        ),
        (LLAMA, {"rms_norm_eps": float("nan")}, "epsilon of norms is nan"),
        (LLAMA, {"rope_theta": float("nan")}, "frequency of rope"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "9 of 8 experts cannot be chosen"),
        (MISTRAL, {"sliding_window": 0}, "window of 0 tokens"),
        (MISTRAL, {"sliding_window": -4}, "window of -4 tokens"),
        (QWEN2_MOE, {"layer_types": ["sliding_attention"] * 3}, "window of 0 tokens"),
        (QWEN2_MOE, {"decoder_sparse_step": 0}, "not valid: ZeroDivisionError"),
        (GEMMA2, {"attn_logit_softcapping": 0.0}, "soft cap is 0.0"),
        (GEMMA2, {"final_logit_softcapping": -1.0}, "soft cap is -1.0"),
        (PHI3, {"partial_rotary_factor": 3.0}, "rope turns 3.0 of each head"),
    ],
)
def test_what_cannot_be_is_named_with_its_class(base, changes, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(base | changes))
    with pytest.raises(ModelError, match=words) as refused:
        load(tmp_path)
    assert str(refused.value).startswith(f"{base['architectures'][0]}: ")


@pytest.mark.parametrize("names", [5, "LlamaForCausalLM", [5], [["LlamaForCausalLM"]], {"a": 1}])
def test_architectures_are_a_list_of_names(names, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"architectures": names}))
    with pytest.raises(ModelError, match="architectures"):
        read_config(tmp_path)


def test_shapes_of_layers_may_be_anything(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"head_dim": [[8], {"a": 10}, 16]}))
    with pytest.raises(ModelError, match="head_dim is"):
        read_config(tmp_path)


def test_a_config_of_a_thousand_brackets_is_no_config(tmp_path):
    (tmp_path / "config.json").write_text('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(ModelError, match=r"config\.json is no config"):
        read_config(tmp_path)


@pytest.mark.parametrize("ends", ["x", [1, "x"], {"a": 1}, [[1]], 0.5])
def test_ends_of_sequence_that_are_no_numbers_are_refused(ends, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ModelError, match="eos_token_id"):
        read_config(tmp_path)


def test_no_context_is_longer_than_float32_counts(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 10**12}))
    assert read_config(tmp_path).max_position_embeddings == 1 << 24
