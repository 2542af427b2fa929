"""Options of `write_tiny_model` for the families beyond Llama, Mistral and Qwen: small windows,
small caps, and multipliers that matter."""

from __future__ import annotations

from typing import Any

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
SHORT, LONG = [1.0, 1.1, 1.3, 1.7, 2.0, 2.5], [1.5, 2.0, 3.0, 5.0, 7.0, 9.0]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64, "short_factor": SHORT, "long_factor": LONG,
}  # fmt: skip


def without(options: dict[str, Any], *keys: str) -> dict[str, Any]:
    """The options but these."""
    return {key: value for key, value in options.items() if key not in keys}


DENSE: dict[str, dict[str, Any]] = {
    "gemma2": {
        "family": "gemma2", "head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0, "layers": 3,
    },
    "gemma3": {
        "family": "gemma3_text", "head_dim": 32, "sliding_window": 12, "layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": LINEAR_ROPE,
        },
    },
    "phi3": {"family": "phi3", "sliding_window": 24},
    "phi4_mini": {
        "family": "phi3", "tie_word_embeddings": True,
        "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.75},
    },
    "granite": {
        "family": "granite", "attention_multiplier": 0.1, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5, "logits_scaling": 4.0, "attention_bias": True,
    },
    "cohere2": {
        "family": "cohere2", "layers": 4, "sliding_window": 12, "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True,
    },
    "glm": {"family": "glm", "head_dim": 32, "attention_bias": True},
    "seed_oss": {"family": "seed_oss", "head_dim": 32},
    "ernie4_5": {"family": "ernie4_5", "use_bias": True, "tie_word_embeddings": True},
    "exaone4": {
        "family": "exaone4", "layers": 4, "sliding_window": 12, "sliding_window_pattern": 2,
    },
    "glm4": {"family": "glm4", "head_dim": 32, "attention_bias": True},
    "smollm3": {"family": "smollm3", "no_rope_layer_interval": 2},
    "olmo2": {"family": "olmo2"},
    "olmo3": {
        "family": "olmo3", "sliding_window": 12, "layers": 4,
        "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": YARN},
    },
}  # fmt: skip

EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "family": "qwen2_moe", "num_experts": 8, "num_experts_per_tok": 3, "layers": 3,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96, "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "family": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 32,
        "moe_intermediate_size": 64, "norm_topk_prob": True, "decoder_sparse_step": 1,
    },
    "gpt_oss": {
        "family": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
        "sliding_window": 24, "swiglu_limit": 1.5,
    },
    "glm4_moe": {
        "family": "glm4_moe", "layers": 3, "head_dim": 32, "use_qk_norm": True,
        "attention_bias": True, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
        "topk_group": 2, "moe_intermediate_size": 64, "routed_scaling_factor": 2.5,
    },
    "minimax_m2": {
        "family": "minimax_m2", "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
    },
    "solar_open": {
        "family": "solar_open", "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "routed_scaling_factor": 2.0,
    },
    "mellum": {
        "family": "mellum", "layers": 3, "head_dim": 32, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": YARN,
        },
    },
    "exaone_moe": {
        "family": "exaone_moe", "layers": 4, "sliding_window": 12, "sliding_window_pattern": 2,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "num_shared_experts": 1, "n_group": 2, "topk_group": 1,
    },
    "hy_v3": {
        "family": "hy_v3", "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "num_shared_experts": 1,
    },
    "ernie4_5_moe": {
        "family": "ernie4_5_moe", "layers": 3, "moe_num_experts": 8, "moe_k": 2,
        "moe_intermediate_size": 64, "moe_num_shared_experts": 2, "tie_word_embeddings": True,
    },
    "dots1": {
        "family": "dots1", "layers": 3, "head_dim": 32, "n_routed_experts": 8,
        "max_window_layers": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "sliding_window": 12,
    },
}  # fmt: skip

MROPE = DEFAULT_ROPE | {"mrope_section": [4, 2, 2]}
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
QWEN_VISION = {
    "hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64,
}  # fmt: skip
GROWING_YARN = YARN | {
    "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
IMAGES: dict[str, dict[str, Any]] = {
    "gemma3_images": {
        "family": "gemma3", "layers": 4, "tie_word_embeddings": True, "vision": VISION,
        "text": without(DENSE["gemma3"], "family", "layers"),
    },
    "qwen2_5_vl": {
        "family": "qwen2_5_vl", "vision": QWEN_VISION, "text": {"rope_parameters": MROPE},
    },
    "qwen3_vl": {
        "family": "qwen3_vl", "tie_word_embeddings": True,
        "vision": QWEN_VISION | {"deepstack_visual_indexes": [0]},
        "text": {"head_dim": 16, "rope_parameters": MROPE | {"mrope_interleaved": True}},
    },
    "qwen3_vl_moe": {
        "family": "qwen3_vl_moe", "vision": QWEN_VISION | {"deepstack_visual_indexes": [0]},
        "text": {
            "head_dim": 16, "rope_parameters": MROPE, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
        },
    },
    "mistral3": {
        "family": "mistral3", "vision": VISION | {"model_type": "pixtral", "head_dim": 16},
        "text": {"model_type": "ministral3", "head_dim": 32, "rope_parameters": GROWING_YARN},
    },
    "glm4v": {
        "family": "glm4v", "vision": QWEN_VISION,
        "text": {
            "rope_parameters": DEFAULT_ROPE
            | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
    },
    "glm_ocr": {
        "family": "glm_ocr", "vision": QWEN_VISION,
        "text": {
            "rope_parameters": DEFAULT_ROPE
            | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
    },
    "glm4v_moe": {
        "family": "glm4v_moe", "layers": 3, "vision": QWEN_VISION,
        "text": {
            "n_routed_experts": 8, "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "rope_parameters": DEFAULT_ROPE
            | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
    },
}  # fmt: skip

GEMMA_4 = {
    "family": "gemma4_text", "layers": 4, "head_dim": 16, "global_head_dim": 32, "heads": 4,
    "kv_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "tie_word_embeddings": True, "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 4.0,
}  # fmt: skip
BY_LAYER: dict[str, dict[str, Any]] = {
    "gemma4": GEMMA_4,
    "gemma4_shared": GEMMA_4 | {
        "layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 384,
    },
    "gemma4_experts": GEMMA_4 | {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48,
    },
    "lfm2": {
        "family": "lfm2", "layers": 4, "block_multiple_of": 16, "conv_bias": True,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"], "kv_heads": 4,
    },
    "lfm2_moe": {
        "family": "lfm2_moe", "layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "num_dense_layers": 1, "kv_heads": 4,
    },
}  # fmt: skip
"""Layers keep K and V of several shapes, or none."""

HYBRID: dict[str, Any] = {
    "layers": 3, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
QWEN_MIXTURE: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "family": "granitemoehybrid", "layers": 3, "layer_types": ["mamba", "mamba", "attention"],
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12, "mamba_n_groups": 1,
    "shared_intermediate_size": 96, "attention_multiplier": 0.1, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5, "logits_scaling": 0.5,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "family": "nemotron_h", "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16,
    "ssm_state_size": 12, "n_groups": 2, "time_step_min": 0.6, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 1.5,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": HYBRID | QWEN_MIXTURE | {
        "family": "qwen3_next", "decoder_sparse_step": 1, "norm_topk_prob": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "qwen3_5": HYBRID | {"family": "qwen3_5_text", "attention_bias": True},
    "qwen3_5_moe": HYBRID | QWEN_MIXTURE | {"family": "qwen3_5_moe_text"},
    "granite4": MAMBA | {"num_local_experts": 0, "mamba_conv_bias": True},
    "granite4_experts": MAMBA | {
        "num_local_experts": 8, "num_experts_per_tok": 3, "mamba_n_groups": 2,
        "mamba_proj_bias": True, "position_embedding_type": "rope",
    },
    "nemotron_h": NEMOTRON | {"hybrid_override_pattern": "-M-M*-", "mlp_bias": True},
    "nemotron_h_experts": NEMOTRON | {
        "hybrid_override_pattern": "ME*-M", "moe_latent_size": 40, "n_group": 2, "use_bias": True,
    },
    "qwen3_5_images": {
        "family": "qwen3_5", "layers": 3, "vision": QWEN_VISION,
        "text": {k: v for k, v in HYBRID.items() if k != "layers"},
    },
}  # fmt: skip
"""Some layers fold tokens into a state. `tests/engine/test_states.py` runs them on every path."""
LATENT = {
    "heads": 4, "kv_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 64, "n_shared_experts": 2, "layers": 3,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.0,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
}  # fmt: skip
LATENTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | {
        "family": "deepseek_v2", "topk_method": "group_limited_greedy", "q_lora_rank": None,
    },
    "deepseek_v3": LATENT | {"family": "deepseek_v3", "q_lora_rank": 48},
    "glm4_moe_lite": {k: v for k, v in LATENT.items() if k != "first_k_dense_replace"} | {
        "family": "glm4_moe_lite", "q_lora_rank": 48, "v_head_dim": 24,
        "rope_parameters": DEFAULT_ROPE, "attention_bias": True,
    },
}  # fmt: skip
"""Attention over latents. There is one page layout, and none of heads."""

BY_LAYER |= {
    "lfm2_vl": {
        "family": "lfm2_vl",
        "tie_word_embeddings": True,
        "layers": 4,
        "vision": VISION | {"model_type": "siglip2_vision_model"},
        "text": {"model_type": "lfm2", **without(BY_LAYER["lfm2"], "family", "layers")},
    },
    "gemma4_unified": {
        "family": "gemma4_unified",
        "tie_word_embeddings": True,
        "layers": 4,
        "vision": {"mm_embed_dim": 32, "patch_size": 4, "pooling_kernel_size": 1},
        "text": without(
            GEMMA_4, "family", "layers", "tie_word_embeddings", "hidden_size_per_layer_input"
        )
        | {"pad_token_id": 0, "num_global_key_value_heads": 2},
    },
}
OWN_GATES: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"family": "hunyuan_v1_dense", "head_dim": 32},
    "hunyuan_v1_moe": {
        "family": "hunyuan_v1_moe", "head_dim": 32, "num_experts": 8, "moe_topk": 2,
        "rope_parameters": DEFAULT_ROPE | {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0},
    },
    "laguna": {
        "family": "laguna", "layers": 3, "head_dim": 32, "num_experts": 8, "sliding_window": 12,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "moe_routed_scaling_factor": 2.5,
        "shared_expert_intermediate_size": 48, "num_attention_heads_per_layer": [4, 8, 4],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
        },
    },
    "afmoe": {
        "family": "afmoe", "layers": 3, "head_dim": 32, "num_experts": 8, "num_dense_layers": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_shared_experts": 1,
        "sliding_window": 12, "route_scale": 2.5, "mup_enabled": True,
        "global_attn_every_n_layers": 3,
    },
}  # fmt: skip
"""Attention with gates of a product of their own, or with norms behind rope. No fused kernels."""
LATENTS["kimi_k25"] = {
    "family": "kimi_k25", "heads": 4, "kv_heads": 4, "vision": VISION,
    "text": {k: v for k, v in LATENT.items() if k not in ("heads", "kv_heads", "layers")}
    | {"model_type": "deepseek_v3", "q_lora_rank": 48, "num_hidden_layers": 3},
}  # fmt: skip

FUSED = {**DENSE, **EXPERTS, **IMAGES, **BY_LAYER}
EVERY = {**FUSED, **LATENTS, **OWN_GATES}
SLOW = (
    *("minimax_m2", "hy_v3", "dots1", "solar_open", "mellum", "exaone_moe"),
    *("glm", "seed_oss", "ernie4_5", "exaone4", "lfm2_vl", "gemma4_unified"),
    "gemma4",
    "gemma4_experts",
    "lfm2_moe",
    "deepseek_v2",
    "glm4_moe_lite",
    "kimi_k25",
    "hunyuan_v1_dense",
    "afmoe",
    *IMAGES.keys() - {"mistral3"},
)
"""Families whose mechanisms others have, too: `make test` runs their logits, and no more."""
