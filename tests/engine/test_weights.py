"""Where weights come from: shards, GGUF, and what is said when they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
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


def write_gguf(path, source: LoadedModel):
    """A float32 GGUF of a loaded folder, with llama's interleaved rope rows."""
    from gguf import GGUFWriter

    config = source.config
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.layers[0].feed_forward.width)
    writer.add_head_count(config.mixers[0].heads)
    writer.add_head_count_kv(config.kept.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(0)
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    tops = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    for name, values in load_file(Path(source.path) / "model.safetensors").items():
        if name in tops:
            writer.add_tensor(tops[name], values.numpy())
            continue
        _, _, layer, kind = name.removesuffix(".weight").split(".", 3)
        if kind in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.mixers[0].heads if "q_proj" in kind else config.kept.kv_heads
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = halves.transpose(1, 2).reshape(values.shape)
        writer.add_tensor(f"blk.{layer}.{names[kind]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_holds_what_the_folder_held(tmp_path):
    original = load(write_tiny_model(tmp_path / "hf", tokenizer=False))
    file = tmp_path / "gguf" / "tiny.gguf"
    file.parent.mkdir()
    write_gguf(file, original)
    for path in (file, file.parent):
        again = load(path)
        assert again.config.kept == original.config.kept
        assert same_weights(original, again)
        assert again.path == str(file.parent), "its tokenizer lies beside it"
