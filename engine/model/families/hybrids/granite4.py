"""Granite 4: Mamba-2 in most layers, attention without rope in the others, and Granite's
multipliers. Feed-forwards are dense, or experts with a shared one."""

from __future__ import annotations

from typing import Any, Final

from engine.model.config import (
    ExpertsConfig,
    FeedForwardConfig,
    GatedConfig,
    LayerConfig,
    ModelConfig,
    ModelError,
    UnsupportedModelError,
)
from engine.model.experts.config import ExpertNames
from engine.model.families.reading import (
    FULL,
    Family,
    biases,
    decoder,
    layers_alike,
    rope,
    routing,
    silu_only,
)
from engine.model.mixers.config import MambaConfig

LINEAR = "linear_attention"
MOST_UNITS: Final = 16
"""Most parts of the state, unless it has more groups, and so most ranks. Each has B and C once
more. Not tuned."""
NAMES = ExpertNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe",
    gate_up="input_linear.weight",
    down="output_linear.weight",
    stacked=True,
    behind=True,
    straight=True,
)


def _read(config: Any, _longest: int) -> ModelConfig:
    kinds = list(config.layer_types)
    if len(kinds) != config.num_hidden_layers or set(kinds) - {FULL, LINEAR} or FULL not in kinds:
        raise ModelError(f"layer_types are {', '.join(sorted(set(kinds)))}, {len(kinds)} in all")
    attention = layers_alike(
        config,
        _feed_forward(config),
        scale=float(config.attention_multiplier),
        rope=rope(config) if config.position_embedding_type == "rope" else None,
        **biases(config),
    )
    mamba = _mamba(config)
    layers = [
        layer if kind == FULL else LayerConfig(mamba, layer.feed_forward)
        for layer, kind in zip(attention, kinds, strict=True)
    ]
    return decoder(
        config,
        layers,
        embedding_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        logits_scale=1.0 / config.logits_scaling,
    )


def _feed_forward(config: Any) -> FeedForwardConfig:
    silu_only(config)
    dense = GatedConfig(
        int(config.shared_intermediate_size),
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
    )
    if not config.num_local_experts:
        return dense
    how = routing(config.num_local_experts, config.num_experts_per_tok, normalised=True)
    return ExpertsConfig(int(config.intermediate_size), how, shared=dense, names=NAMES)


def _mamba(config: Any) -> MambaConfig:
    if config.hidden_act not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"Mamba layers with the activation {config.hidden_act} are not supported; silu is"
        )
    heads, groups = int(config.mamba_n_heads), int(config.mamba_n_groups)
    least, most = config.time_step_limit
    return MambaConfig(
        heads=heads,
        head_dim=int(config.mamba_d_head),
        groups=groups,
        state_dim=int(config.mamba_d_state),
        kernel=int(config.mamba_d_conv),
        units=units_of(heads, groups),
        least_step=float(least),
        most_step=float(most),
        conv_bias=bool(config.mamba_conv_bias),
        bias=bool(config.mamba_proj_bias),
    )


def units_of(heads: int, groups: int) -> int:
    """Parts of a Mamba state, each with equally many heads of one group.

    Raises:
        ModelError: groups differ in their heads.
    """
    if heads < 1 or groups < 1 or heads % groups:
        raise ModelError(f"{heads} Mamba heads do not make {groups} groups")
    parts = (n for n in range(groups, max(MOST_UNITS, groups) + 1, groups) if heads % n == 0)
    return max(parts)


FAMILIES = {
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", _read, by_layer=True),
}
