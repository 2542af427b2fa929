"""Options of `write_tiny_model` for decoders that run through transformers' own code."""

from __future__ import annotations

from typing import Any

from tiny_families import DENSE, EXPERTS, LATENTS

PATHS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": EXPERTS["qwen3_moe"],
    "vaultgemma": {
        "family": "vaultgemma", "head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0, "layers": 3,
    },
}  # fmt: skip
"""Which `make test` runs on every path: two with a file of ours, and one without, which has
windows, caps, and norms by 1 + weight."""

WRAPPED: dict[str, dict[str, Any]] = {
    **PATHS,
    "afmoe": {
        "family": "afmoe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 12,
    },
    "apertus": {"family": "apertus"},
    "arcee": {"family": "arcee"},
    "biogpt": {"family": "biogpt"},
    "bitnet": {"family": "bitnet"},
    "cohere": {"family": "cohere", "tie_word_embeddings": True},
    "deepseek_v3": LATENTS["deepseek_v3"],
    "diffllama": {"family": "diffllama"},
    "exaone4": DENSE["exaone4"],
    "flex_olmo": {"family": "flex_olmo", "num_experts": 4, "num_experts_per_tok": 2},
    "gemma3": DENSE["gemma3"],
    "gpt2": {"family": "gpt2", "tie_word_embeddings": True},
    "gpt_neox": {"family": "gpt_neox"},
    "gpt_oss": EXPERTS["gpt_oss"],
    "granitemoe": {"family": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {
        "family": "granitemoeshared", "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "jais2": {"family": "jais2"},
    "nanochat": {"family": "nanochat"},
    "nemotron": {"family": "nemotron"},
    "olmo": {"family": "olmo"},
    "olmoe": {"family": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"family": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {"family": "persimmon"},
    "phi": {"family": "phi"},
    "phimoe": {"family": "phimoe", "num_local_experts": 4, "num_experts_per_tok": 2},
    "stablelm": {"family": "stablelm"},
    "starcoder2": {"family": "starcoder2", "sliding_window": 12},
}  # fmt: skip
"""All classes that are compared."""
