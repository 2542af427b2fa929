"""What is read from config.json, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_families import LONG, LONGROPE, SHORT

from engine.checkpoints import CheckpointError, SamplingDefaults, sampling_defaults
from engine.model import ModelConfig, ModelError, UnsupportedModelError
from engine.model.families import read_config
from engine.model.mixers.config import AttentionConfig, Kept, QkNorm
from engine.model.mixers.rope import Rope

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 2,
}  # fmt: skip
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def rope(config: ModelConfig) -> Rope:
    """That of all layers."""
    (found,) = {mixer.rope for mixer in config.mixers}
    assert found is not None
    return found


def windows(config: ModelConfig) -> tuple[int | None, ...]:
    return tuple(mixer.kept.window for mixer in config.mixers)


def attention(config: ModelConfig) -> AttentionConfig:
    """Of the first layer."""
    found = config.mixers[0]
    assert isinstance(found, AttentionConfig)
    return found


@pytest.fixture
def read(tmp_path: Path):
    def written(base: dict[str, Any], **changes: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(base | changes))
        return read_config(tmp_path)

    return written


def test_families_differ_in_biases_and_norms(read):
    def traits(config: ModelConfig) -> tuple[bool, bool, bool, bool]:
        own, by_head = attention(config), attention(config).qk_norm is QkNorm.HEAD
        return own.qkv_bias, own.output_bias, config.layers[0].feed_forward.bias, by_head

    assert traits(read(LLAMA)) == traits(read(MISTRAL)) == (False, False, False, False)
    assert traits(read(LLAMA, attention_bias=True, mlp_bias=True)) == (True, True, True, False)
    assert traits(read(QWEN2)) == (True, False, False, False)
    assert traits(read(QWEN3)) == (False, False, False, True)
    assert traits(read(QWEN3, attention_bias=True)) == (True, True, False, True)


def test_head_dim_and_kv_heads_may_be_left_out(read):
    without = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert read(without).kept == Kept(4, 16)
    assert read(LLAMA, head_dim=32).kept.head_dim == 32
    assert len(rope(read(LLAMA, head_dim=32)).frequencies) == 16


@pytest.mark.parametrize(
    ("kind", "options"), [("linear", {"factor": 2.0}), ("yarn", YARN), ("llama3", LLAMA3)]
)
def test_older_forms_of_rope_mean_the_same(kind, options, read):
    new = read(LLAMA, rope_parameters={"rope_type": kind, "rope_theta": 5e4, **options})
    assert new == read(LLAMA, rope_theta=5e4, rope_scaling={"rope_type": kind, **options})
    assert new == read(LLAMA, rope_theta=5e4, rope_scaling={"type": kind, **options})
    plain = read(LLAMA, rope_theta=5e4)
    assert rope(new) != rope(plain) != rope(read(LLAMA))
    assert plain == read(LLAMA, rope_theta=5e4, rope_scaling=None)


def test_yarn_scales_what_is_rotated(read):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, **YARN}
    assert rope(read(QWEN2, rope_parameters=yarn)).scale == pytest.approx(1.1386, abs=1e-4)
    given = read(QWEN2, rope_parameters=yarn | {"attention_factor": 1.5})
    assert rope(given).scale == 1.5
    assert rope(read(QWEN2)).scale == 1.0


def test_windows_are_per_layer(read):
    assert windows(read(MISTRAL, sliding_window=8)) == (8, 8, 8)
    assert windows(read(MISTRAL, sliding_window=None)) == (None, None, None)
    some = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    assert windows(read(QWEN2, **some)) == windows(read(QWEN3, **some)) == (None, None, 8)
    listed = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(read(QWEN3, **some, layer_types=listed)) == (8, None, 8)
    assert windows(read(QWEN2, **some | {"use_sliding_window": False})) == (None, None, None)


def test_a_window_that_llama_would_not_use_is_not_used(read):
    assert windows(read(LLAMA, sliding_window=8)) == (None, None, None)


def test_ends_of_sequence_come_from_both_configs(read, tmp_path):
    assert read(LLAMA).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read(LLAMA).eos_token_ids == (2, 7)
    assert read(LLAMA, eos_token_id=[9, 2]).eos_token_ids == (2, 7, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(LLAMA, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["FooForCausalLM"], "model_type": "foo"}, r"FooForCausalLM.*foo.*Qwen3"),
        ({"architectures": None, "model_type": "foo"}, r"foo.*LlamaForCausalLM"),
        ({"architectures": ["LlamaForTokenClassification"]}, r"LlamaForTokenClassification"),
        ({"model_type": "smollm3"}, "smollm3"),
        ({"hidden_act": "relu"}, "relu.*gelu_pytorch_tanh"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"dynamic.*yarn"),
        ({"rope_scaling": {"rope_type": "mystery"}}, r"mystery.*yarn"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"partial 0\.5",
        ),
    ],
)
def test_what_is_not_computed_is_named(changes, words, read):
    with pytest.raises(UnsupportedModelError, match=words):
        read(LLAMA, **changes)


def test_layers_of_an_unknown_type_are_named(read):
    kinds = ["chunked_attention", "full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": 8}
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        read(QWEN2, **window, layer_types=kinds)


@pytest.mark.parametrize("changes", [{"hidden_size": "many"}, {"hidden_size": 65}])
def test_a_config_that_contradicts_itself_is_refused(changes, read):
    with pytest.raises(ModelError, match="not a valid config"):
        read(LLAMA, **changes)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_cannot_be_read_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json is no config"):
        read_config(tmp_path)


def test_a_folder_of_something_else_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"is no model: it has no config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": [2, 4, 4]}, r"num_key_value_heads is \[2, 4\]"),
        ({"head_dim": 32, "global_head_dim": 64}, "global_head_dim is 64, head_dim is 32"),
        ({"num_global_key_value_heads": 4}, "num_global_key_value_heads is 4"),
        ({"block_configs": []}, "block_configs"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2"),
    ],
)
def test_kv_shapes_that_differ_by_layer_are_refused(changes, words, read):
    """Before anything else, since such models have no file either."""
    named = {"architectures": ["SomeForCausalLM"], "model_type": "some"}
    with pytest.raises(UnsupportedModelError, match=f"SomeForCausalLM: KV shapes.*family.*{words}"):
        read(LLAMA, **named, **changes)


PHI3 = LLAMA | {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0,
    "original_max_position_embeddings": 64, "rope_parameters": LONGROPE,
}  # fmt: skip


def test_longrope_is_chosen_by_the_longest_context(read, tmp_path):
    """Short factors if no context is longer than the original positions, else long ones."""
    long = rope(read(PHI3))
    short, at_the_border, beyond = (rope(read_config(tmp_path, most)) for most in (10, 64, 65))
    assert short == at_the_border
    assert beyond == long
    ratios = [a / b for a, b in zip(short.frequencies, long.frequencies, strict=True)]
    assert ratios == pytest.approx([b / a for a, b in zip(SHORT, LONG, strict=True)], rel=1e-5)
    assert short.scale == long.scale > 1
    assert rope(read_config(tmp_path, 10**9)) == long, "the model allows 256 tokens"


def test_rope_that_follows_length_is_refused_with_the_class_named(read):
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    with pytest.raises(
        UnsupportedModelError, match=r"LlamaForCausalLM: rope type longrope.*length"
    ):
        read(LLAMA, rope_scaling=scaling)


def test_attention_in_both_directions_is_refused(read):
    gemma = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    with pytest.raises(UnsupportedModelError, match="Gemma3ForCausalLM: use_bidirectional"):
        read(LLAMA, **gemma, use_bidirectional_attention=True)


def test_families_that_have_a_file_are_listed(read):
    with pytest.raises(UnsupportedModelError, match="has no file") as refused:
        read(LLAMA, architectures=["GPTNeoXForCausalLM"], model_type="gpt_neox")
    for name in ("Gemma2", "Gemma3", "Granite", "Llama", "Mistral", "Olmo2", "Olmo3", "Phi3"):
        assert f"{name}ForCausalLM" in str(refused.value)


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        ({}, {}),
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"top_k": -1, "min_p": None, "max_new_tokens": 3}, {"top_k": 0}),
        ({"do_sample": False, "top_k": 20}, {"temperature": 0.0, "top_k": 20}),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"temperature": -1}, None),
        ({"top_p": 0}, None),
        ({"top_k": 2.5}, None),
        ({"min_p": "0.1"}, None),
        ({"repetition_penalty": True}, None),
        ([], None),
    ],
)
def test_defaults_of_sampling(stated, found, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    if found is None:
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            sampling_defaults(tmp_path)
    else:
        assert sampling_defaults(tmp_path) == SamplingDefaults(**found)
        assert sampling_defaults(tmp_path / "model.gguf") == SamplingDefaults(**found)
