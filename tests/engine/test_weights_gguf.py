"""GGUF files against the folders they were written from."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import write_tiny_model

from engine.model import LoadedModel, ModelError, UnsupportedModelError, load_model

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
ROPE_KEYS = {"factor": "factor", "original_max_position_embeddings": "original_context_length"}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(str(path), dtype=torch.float32, device=CPU, **options)


def header(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Keys of the architecture's own, from a Hugging Face config."""
    heads = config["num_attention_heads"]
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": config.get("head_dim") or config["hidden_size"] // heads,
    }
    if config.get("head_dim"):
        keys["attention.key_length"] = keys["attention.value_length"] = config["head_dim"]
    if config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    rope = config["rope_parameters"]
    if rope["rope_type"] in ("linear", "yarn"):
        keys["rope.scaling.type"] = rope["rope_type"]
        keys |= {f"rope.scaling.{ROPE_KEYS[k]}": v for k, v in rope.items() if k in ROPE_KEYS}
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_gguf(
    folder: Path,
    file: Path,
    architecture: str = "llama",
    quantisation: gguf.GGMLQuantizationType | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    **keys: Any,
) -> Path:
    """Writes a folder's model as llama.cpp's converter lays it out. `keys` are set, or left out
    where None, with `__` for a dot."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    fields = header(config, architecture) | {"tokenizer.ggml.eos_token_id": config["eos_token_id"]}
    fields |= {f"{architecture}.{key.replace('__', '.')}": value for key, value in keys.items()}
    for key, value in fields.items():
        kind = {str: "string", float: "float32", int: "uint32", list: "array"}
        if value is not None:
            getattr(writer, f"add_{kind[type(value)]}")(key, value)
    for name, tensor in (load_file(folder / "model.safetensors") | (tensors or {})).items():
        if architecture == "llama" and re.search(r"self_attn\.[qk]_proj", name):
            which = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            tensor = interleaved(tensor, config[which])
        values, kind = np.ascontiguousarray(tensor), None
        if quantisation and values.ndim == 2:
            values, kind = gguf.quants.quantize(values, quantisation), quantisation
        writer.add_tensor(gguf_name(name), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_name(name: str) -> str:
    if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(\w+)", name):
        return f"blk.{layer[1]}.{NAMES[layer[2]]}.{layer[3]}"
    stem, _, suffix = name.rpartition(".")
    return f"{NAMES.get(stem, stem)}.{suffix}"


CASES = {
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mha": ("llama", {"kv_heads": 4}),
    "head_dim": ("llama", {"head_dim": 32}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "mistral_window": ("llama", {"family": "mistral", "sliding_window": 24}),
    "qwen2": ("qwen2", {"family": "qwen2", "use_sliding_window": False}),
    "qwen2_yarn": (
        "qwen2",
        {"family": "qwen2", "use_sliding_window": False, "rope_parameters": YARN},
    ),
    "qwen3": ("qwen3", {"family": "qwen3", "head_dim": 32}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_file_is_the_folder_again(case, tmp_path):
    architecture, options = CASES[case]
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False, **options)
    original = load(folder)
    again = load(write_gguf(folder, tmp_path / "tiny.gguf", architecture))
    assert again.path == str(tmp_path), "its tokenizer lies beside it"
    eps = again.config.norm_eps
    assert eps == pytest.approx(original.config.norm_eps, rel=1e-6)
    assert again.config == replace(original.config, norm_eps=eps)
    for a, b in zip(original.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_llama3_rope_comes_as_a_tensor_of_divisors(tmp_path):
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False, rope_parameters=LLAMA3)
    scaled = load(folder).config.mixers[0].rope.frequencies
    unscaled = (
        load(write_tiny_model(tmp_path / "plain", tokenizer=False, rope_parameters=plain))
        .config.mixers[0]
        .rope.frequencies
    )
    divisors = torch.tensor(unscaled) / torch.tensor(scaled)
    assert divisors.max() > 3.9
    file = write_gguf(folder, tmp_path / "tiny.gguf", tensors={"rope_freqs.weight": divisors})
    assert load(file).config.mixers[0].rope.frequencies == pytest.approx(scaled, rel=1e-6)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_blocks_are_dequantised_as_gguf_defines_it(kind, tmp_path):
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False)
    quantisation = gguf.GGMLQuantizationType[kind]
    got = load(write_gguf(folder, tmp_path / "tiny.gguf", quantisation=quantisation))
    weights = load_file(folder / "model.safetensors")
    for name, part in (
        ("lm_head.weight", got.model.head),
        (
            "model.layers.1.mlp.down_proj.weight",
            got.model.layers[1].feed_forward.down.method.weight,
        ),
    ):
        blocks = gguf.quants.quantize(weights[name].numpy(), quantisation)
        want = torch.from_numpy(gguf.dequantize(blocks, quantisation).astype(np.float32))
        assert torch.equal(part, want)
        assert not torch.equal(part, weights[name])


@pytest.mark.parametrize(
    ("architecture", "keys", "words"),
    [
        ("gemma3", {}, r"gemma3.*llama, qwen2, qwen3"),
        ("llama", {"rope__scaling__type": "longrope"}, "longrope"),
        (
            "llama",
            {"rope__scaling__type": "yarn", "rope__scaling__attn_factor": 0.5},
            "attn_factor",
        ),
        ("llama", {"rope__dimension_count": 8}, "dimension_count"),
        ("llama", {"attention__value_length": 8}, "value_length"),
        ("qwen2", {"attention__sliding_window": 8}, "sliding window"),
    ],
)
def test_headers_that_ask_for_more_are_refused(architecture, keys, words, tmp_path):
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False)
    file = write_gguf(folder, tmp_path / "tiny.gguf", architecture, **keys)
    with pytest.raises(UnsupportedModelError, match=words):
        load(file)


def test_rope_scaling_of_older_and_newer_writers(tmp_path):
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False, rope_parameters=LINEAR)
    want = load(folder).config.mixers[0].rope.frequencies
    older = {"rope__scaling__type": None, "rope__scaling__factor": None, "rope__scale_linear": 2.0}
    file = write_gguf(folder, tmp_path / "older.gguf", **older)
    assert load(file).config.mixers[0].rope.frequencies == want
    none = write_gguf(
        folder, tmp_path / "none.gguf", rope__scaling__type="none", rope__scaling__factor=None
    )
    assert load(none).config.mixers[0].rope.frequencies != want


def test_headers_that_lack_something_and_files_that_are_none(tmp_path):
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False)
    with pytest.raises(ModelError, match="block_count"):
        load(write_gguf(folder, tmp_path / "a.gguf", block_count=None))
    with pytest.raises(ModelError, match="head_count"):
        load(write_gguf(folder, tmp_path / "b.gguf", attention__head_count=[4, 2]))
    for key, value, words in (
        ("block_count", 10**9, "num_hidden_layers is 1000000000"),
        ("attention.head_count", 0, "head_count is 0"),
        ("embedding_length", 63, "no valid header"),
    ):
        with pytest.raises(ModelError, match=words):
            load(write_gguf(folder, tmp_path / "a.gguf", **{key: value}))
    with pytest.raises(ModelError, match="readable GGUF"):
        load(folder / "config.json")


def test_a_mixture_of_experts_is_refused_by_its_tensors(tmp_path):
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False)
    gate = {"blk.0.ffn_gate_inp.weight": torch.zeros(4, 64)}
    with pytest.raises(ModelError, match="ffn_gate_inp"):
        load(write_gguf(folder, tmp_path / "tiny.gguf", tensors=gate))


def test_which_file_is_read_is_never_a_guess(tmp_path):
    folder = write_tiny_model(tmp_path / "hf", tokenizer=False)
    only = tmp_path / "only"
    only.mkdir()
    file = write_gguf(folder, only / "a.gguf")
    with pytest.raises(ModelError, match="safetensors"):
        load(file, load_format="safetensors")
    with pytest.raises(ModelError, match="no GGUF"):
        load(folder, load_format="gguf")
    assert load(only, load_format="dummy").config == load(only).config
    write_gguf(folder, only / "b.gguf")
    with pytest.raises(ModelError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        load(only)
    write_gguf(folder, folder / "c.gguf")
    assert load(folder).path == str(folder)
    file = load(folder, load_format="gguf")
    assert file.revision != load(folder).revision
    assert file.path == str(folder), "where the tokenizer would be"
