"""DeepSeek-V2, V3 and R1, Kimi K2, the text part of Kimi K2.5 to 2.7, and GLM-4.7-Flash: attention
over latents, and experts beside shared ones behind a few plain layers. V2 chooses experts by
softmax, the others by sigmoids with a bias. Draft layers are not read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from engine.model.config import (
    ExpertsConfig,
    FeedForwardConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    UnsupportedModelError,
)
from engine.model.experts.config import Routing
from engine.model.families.reading import (
    Family,
    by_text,
    decoder,
    deepseek_experts,
    gated,
    rope,
    routing,
    shared_experts,
    silu_only,
)
from engine.model.mixers.config import LatentConfig

NORM_EPS: Final = 1e-6
"""Epsilon of the norms of latents, whatever a config says of the others."""


def _read_v2(config: Any, _longest: int) -> ModelConfig:
    silu_only(config)
    _expect(config, scoring_func="softmax", moe_layer_freq=1)
    if config.norm_topk_prob:
        raise UnsupportedModelError("norm_topk_prob: weights of experts are not normalised in V2")
    experts = ExpertsConfig(
        config.moe_intermediate_size,
        _routing_v2(config),
        shared=shared_experts(config, config.n_shared_experts),
    )
    plain, count = int(config.first_k_dense_replace), int(config.num_hidden_layers)
    forwards = [experts if index >= plain else gated(config) for index in range(count)]
    return _decoder(config, forwards)


def _routing_v2(config: Any) -> Routing:
    groups = open_groups = 1
    if config.topk_method == "group_limited_greedy":
        groups, open_groups = int(config.n_group), int(config.topk_group)
    elif config.topk_method != "greedy":
        raise UnsupportedModelError(f"topk_method {config.topk_method}")
    return routing(
        config.num_experts,
        config.num_experts_per_tok,
        factor=float(config.routed_scaling_factor),
        groups=groups,
        open_groups=open_groups,
    )


def _read_v3(config: Any, _longest: int) -> ModelConfig:
    _expect(config, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return _decoder(config, deepseek_experts(config))


def _read_glm(config: Any, _longest: int) -> ModelConfig:
    experts = deepseek_experts(config, first=0)
    kinds: dict[str, Sequence[FeedForwardConfig]] = {
        "sparse": experts,
        "dense": [gated(config)] * len(experts),
    }
    stated = list(config.mlp_layer_types)
    if len(stated) != len(experts) or set(stated) - kinds.keys():
        raise ModelError(
            f"mlp_layer_types are {', '.join(sorted(set(stated)))}, {len(stated)} in all"
        )
    return _decoder(config, [kinds[kind][index] for index, kind in enumerate(stated)])


def _decoder(config: Any, forwards: Sequence[FeedForwardConfig]) -> ModelConfig:
    latent = _latent(config)
    return decoder(config, [LayerConfig(latent, forward) for forward in forwards])


def _latent(config: Any) -> LatentConfig:
    bias, q_rank = bool(config.attention_bias), config.q_lora_rank
    if bias and q_rank is None:
        raise UnsupportedModelError("attention_bias without a latent of queries (q_lora_rank)")
    turned = replace(rope(config), neighbours=bool(getattr(config, "rope_interleave", True)))
    own = LatentConfig(
        heads=int(config.num_attention_heads),
        q_rank=None if q_rank is None else int(q_rank),
        rank=int(config.kv_lora_rank),
        k_dim=int(config.qk_nope_head_dim),
        v_dim=int(config.v_head_dim),
        rope=turned,
        scale=1.0,
        norm_eps=NORM_EPS,
        bias=bias,
    )
    if own.turned != config.qk_rope_head_dim:
        raise ModelError(f"qk_rope_head_dim is {config.qk_rope_head_dim}: pairs are rotated")
    scale = own.head_dim**-0.5 * _growth(config.rope_parameters) ** 2
    return replace(own, scale=scale)


def _growth(parameters: Mapping[str, Any]) -> float:
    """What yarn makes q and k larger by, beyond the scale of cos and sin."""
    all_dim = parameters.get("mscale_all_dim")
    if parameters.get("rope_type", "default") == "default" or not all_dim:
        return 1.0
    factor = float(parameters["factor"])
    return 1.0 if factor <= 1 else 0.1 * float(all_dim) * math.log(factor) + 1.0


def _expect(config: Any, **stated: Any) -> None:
    """Refuses a config that states something else, where transformers would not look."""
    for name, value in stated.items():
        if (found := getattr(config, name, None)) not in (None, value):
            raise UnsupportedModelError(f"{name} {found}; it is {value} in this family")


FAMILIES = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _read_v2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _read_v3, drafts="layers"),
    "kimi_k2": Family("DeepseekV3ForCausalLM", _read_v3, drafts="layers", reads_as="deepseek_v3"),
    "kimi_k25": Family(
        "KimiK25ForConditionalGeneration",
        by_text({"deepseek_v3": _read_v3}),
        also="Kimi_K25ForConditionalGeneration",
        has_images=True,
        drafts="layers",
    ),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", _read_glm, drafts="layers"),
}
