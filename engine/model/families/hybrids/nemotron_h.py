"""Nemotron-H and Nemotron 3: each layer is one thing alone, with a norm before it: Mamba-2,
attention without rope, or a feed-forward, whose products have a squared relu between them. It may
be of experts, which may read fewer numbers than layers have. Draft layers are not read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from engine.model.config import (
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    ModelError,
    Norms,
    Reduced,
    UnsupportedModelError,
)
from engine.model.experts.config import SQUARED, ExpertNames
from engine.model.families.hybrids.granite4 import units_of
from engine.model.families.reading import FULL, Family, decoder, deepseek_routing, head_dim
from engine.model.families.sense import MOST_LAYERS
from engine.model.mixers.config import AttentionConfig, MambaConfig

LINEAR: Final = "linear_attention"
MODULE: Final = "mixer"
"""Name of what a layer is, whatever that is."""
MIXES: Final = Norms(before_mixer="norm", before_feed_forward=None)
FEEDS: Final = Norms(before_mixer=None, before_feed_forward="norm")
NAMES: Final = ExpertNames(
    router=f"{MODULE}.gate",
    experts=f"{MODULE}.experts",
    bias=f"{MODULE}.gate.e_score_correction_bias",
)


def _read(config: Any, _longest: int) -> ModelConfig:
    kinds = list(config.layer_types)
    if len(kinds) > MOST_LAYERS or not {FULL, LINEAR} <= set(kinds) <= _LAYERS.keys():
        raise ModelError(
            f"layers are {', '.join(sorted(map(str, set(kinds))))}, {len(kinds)} in all; they are"
            f" {', '.join(_LAYERS)}, and of the first two at least one each"
        )
    for name, value in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if (found := getattr(config, name)) != value:
            raise UnsupportedModelError(f"{name} {found} is not supported; {value} is")
    read = {kind: _LAYERS[kind](config) for kind in set(kinds)}
    return decoder(
        config,
        [read[kind] for kind in kinds],
        norm_eps=float(config.layer_norm_epsilon),
        embedding="embeddings",
        last_norm="norm_f",
    )


def _attention(config: Any) -> LayerConfig:
    own = AttentionConfig(
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim(config),
        rope=None,
        scale=head_dim(config) ** -0.5,
        module=MODULE,
    )
    return LayerConfig(own, None, MIXES)


def _mamba(config: Any) -> LayerConfig:
    """Time steps have a least value, as they do in a whole forward of transformers."""
    heads, groups = int(config.mamba_num_heads), int(config.n_groups)
    own = MambaConfig(
        heads=heads,
        head_dim=int(config.mamba_head_dim),
        groups=groups,
        state_dim=int(config.ssm_state_size),
        kernel=int(config.conv_kernel),
        units=units_of(heads, groups),
        least_step=float(config.time_step_min),
        most_step=math.inf,
        conv_bias=bool(config.use_conv_bias),
        bias=bool(config.use_bias),
        module=MODULE,
    )
    return LayerConfig(own, None, MIXES)


def _mlp(config: Any) -> LayerConfig:
    return LayerConfig(None, _products(config, MODULE, config.intermediate_size), FEEDS)


def _products(config: Any, module: str, width: int) -> MlpConfig:
    return MlpConfig(int(width), bool(config.mlp_bias), f"{module}.up_proj", f"{module}.down_proj")


def _experts(config: Any) -> LayerConfig:
    reduced = None
    if (size := config.moe_latent_size) is not None:
        if config.mlp_bias:
            raise UnsupportedModelError("mlp_bias beside moe_latent_size is not supported")
        reduced = Reduced(int(size), f"{MODULE}.fc1_latent_proj", f"{MODULE}.fc2_latent_proj")
    how = deepseek_routing(config, config.n_routed_experts)
    shared = _products(
        config, f"{MODULE}.shared_experts", config.moe_shared_expert_intermediate_size
    )
    own = ExpertsConfig(
        int(config.moe_intermediate_size),
        how,
        gate=SQUARED,
        shared=shared,
        names=NAMES,
        reduced=reduced,
    )
    return LayerConfig(None, own, FEEDS)


_LAYERS: Final[dict[str, Callable[[Any], LayerConfig]]] = {
    LINEAR: _mamba,
    FULL: _attention,
    "mlp": _mlp,
    "moe": _experts,
}

FAMILIES = {
    "nemotron_h": Family("NemotronHForCausalLM", _read, by_layer=True, drafts="/mtp"),
}
