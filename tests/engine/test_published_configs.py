"""Configs as checkpoints publish them, by their numbers. No weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from console.doctor.model import weights_of
from engine.model import ModelError, UnsupportedModelError
from engine.model.families import FAMILIES, read_config

GLM_4_5 = {
    "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True,
    "head_dim": 128, "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92,
    "num_attention_heads": 96, "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
    "rope_theta": 1000000, "use_qk_norm": True, "n_routed_experts": 160, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "first_k_dense_replace": 3,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1, "vocab_size": 151552, "max_position_embeddings": 131072,
}  # fmt: skip
GLM_4_5_AIR = GLM_4_5 | {
    "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "use_qk_norm": False,
    "n_routed_experts": 128, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}  # fmt: skip
QWEN3_VL_8B = {
    "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": False, "vision_config": {"model_type": "qwen3_vl", "depth": 27},
    "text_config": {
        "model_type": "qwen3_vl_text", "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rope_scaling": {
            "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
        },
        "rope_theta": 5000000, "vocab_size": 151936, "max_position_embeddings": 262144,
    },
}  # fmt: skip
QWEN3_VL_30B = QWEN3_VL_8B | {
    "model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": QWEN3_VL_8B["text_config"] | {
        "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "norm_topk_prob": True,
    },
}  # fmt: skip
GEMMA_3_27B = {
    "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106], "vision_config": {"model_type": "siglip_vision_model"},
    "text_config": {
        "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376,
        "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip
GEMMA_3_4B = GEMMA_3_27B | {
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}  # fmt: skip
MISTRAL_SMALL = {
    "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"],
    "vision_config": {"model_type": "pixtral"},
    "text_config": {
        "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "rope_theta": 1000000000.0, "vocab_size": 131072, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05, "sliding_window": None,
    },
}  # fmt: skip
MINIMAX_M2 = {
    "model_type": "minimax_m2", "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128,
    "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "rotary_dim": 64,
    "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_experts_per_tok": 8, "rope_theta": 5000000, "scoring_func": "sigmoid",
    "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    "max_position_embeddings": 196608,
}  # fmt: skip
ERNIE_21B = {
    "model_type": "ernie4_5_moe", "architectures": ["Ernie4_5_MoeForCausalLM"],
    "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
    "num_attention_heads": 20, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_k": 6,
    "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 103424,
}  # fmt: skip
DOTS = {
    "model_type": "dots1", "architectures": ["Dots1ForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 10944, "num_hidden_layers": 62, "num_attention_heads": 32,
    "num_key_value_heads": 32, "n_routed_experts": 128, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "rope_theta": 10000000, "sliding_window": None, "vocab_size": 152064,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 24,
    "num_local_experts": 32,
}  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], float, str]] = {
    "zai-org/GLM-4.5": (GLM_4_5, 355, "92 layers, 96/8 heads of 128, 89 x 160 experts"),
    "zai-org/GLM-4.6": (
        GLM_4_5 | {"max_position_embeddings": 202752}, 355,
        "92 layers, 96/8 heads of 128, 89 x 160 experts",
    ),
    "zai-org/GLM-4.5-Air": (GLM_4_5_AIR, 106, "46 layers, 96/8 heads of 128, 45 x 128 experts"),
    "Qwen/Qwen3-VL-8B-Instruct": (QWEN3_VL_8B, 8.2, "36 layers, 32/8 heads of 128"),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (
        QWEN3_VL_30B, 30.5, "48 layers, 32/4 heads of 128, 48 x 128 experts"
    ),
    "google/gemma-3-27b-it": (GEMMA_3_27B, 27, "62 layers, 32/16 heads of 128, 52 windows"),
    "google/gemma-3-4b-it": (GEMMA_3_4B, 3.9, "34 layers, 8/4 heads of 256, 29 windows"),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": (
        MISTRAL_SMALL, 22.9, "40 layers, 32/8 heads of 128"
    ),
    "MiniMaxAI/MiniMax-M2": (MINIMAX_M2, 230, "62 layers, 48/8 heads of 128, 62 x 256 experts"),
    "baidu/ERNIE-4.5-21B-A3B-PT": (
        ERNIE_21B, 21, "28 layers, 20/4 heads of 128, 27 x 64 experts"
    ),
    "rednote-hilab/dots.llm1.inst": (DOTS, 142, "62 layers, 32/32 heads of 128, 61 x 128 experts"),
    "openai/gpt-oss-20b": (
        GPT_OSS, 21, "24 layers, 64/8 heads of 64, 12 windows, 24 x 32 experts"
    ),
    "openai/gpt-oss-120b": (
        GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 117,
        "36 layers, 64/8 heads of 64, 18 windows, 36 x 128 experts",
    ),
}  # fmt: skip
"""Config, billions of weights of the text part, and what is read. Sources: each checkpoint's page
(huggingface.co/NAME). The numbers were written down from memory and from recipes of others; that
the sizes of the cards come out says that they are right. Mistral's card has 24: its config ties the
head, and only the checkpoint shows that it has one of its own."""


def described(config: Any) -> str:
    (shape,) = {(own.heads, own.kv_heads, own.head_dim) for own in config.mixers}
    parts = [f"{config.num_layers} layers", "{}/{} heads of {}".format(*shape)]
    if windows := sum(own.window is not None for own in config.mixers):
        parts.append(f"{windows} windows")
    routings = [getattr(layer.feed_forward, "routing", None) for layer in config.layers]
    if found := [routing.experts for routing in routings if routing]:
        parts.append(f"{len(found)} x {found[0]} experts")
    return ", ".join(parts)


def written(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name, tmp_path):
    config, _, words = PUBLISHED[name]
    assert described(read_config(written(tmp_path, config))) == words


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_as_many_weights_as_is_said(name, tmp_path):
    config, billions, _ = PUBLISHED[name]
    path = str(written(tmp_path, config))
    weights = weights_of(path, torch.bfloat16, torch.device("cpu"))
    assert weights.count / 1e9 == pytest.approx(billions, rel=0.04)


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
    assert without == {"dots1", "lfm2_moe"}, "numbers of theirs have no usual value"
    assert read == FAMILIES.keys() - without
