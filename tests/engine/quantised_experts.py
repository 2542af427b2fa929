"""Quantised checkpoints of models with experts, and transformers' models that round as they do.

transformers keeps all experts of a layer in one parameter, so hooks on their products are not to be
had: here experts are a module of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from precision_reference import Reference, Rule, rounded
from quantised_checkpoints import Checkpoint
from quantised_folders import FLOAT_INPUT, STATIC, write
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

NAMES = {"mixtral": ("block_sparse_moe.experts", "w1", "w3", "w2")}
USUAL = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
WIDENED = ".kv_b_proj"
"""What makes K and V of a latent is widened in any form, since queries and outputs absorb it."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class RoundingExperts(nn.Module):
    """Experts whose inputs are rounded, all by one scale where it is given."""

    def __init__(self, weights: Sequence[tuple[Tensor, ...]], rules: Sequence[Rule | None]) -> None:
        super().__init__()
        self._weights = weights
        self._rules = rules

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert, (gate, up, down) in enumerate(self._weights):
            tokens, places = torch.where(chosen == expert)
            if len(tokens) == 0:
                continue
            taken = by_rule(x[tokens], self._rules[0])
            middle = nn.functional.silu(taken @ gate.T) * (taken @ up.T)
            product = by_rule(middle, self._rules[1]) @ down.T
            out.index_add_(0, tokens, product * weights[tokens, places, None])
        return out


def by_rule(x: Tensor, rule: Rule | None) -> Tensor:
    if rule is None:
        return x
    return torch.from_numpy(rounded(x.numpy(), rule)[0].restored).float()


def reference_of(
    source: Path, family: str, form: str, checkpoint: Checkpoint
) -> Callable[[Sequence[int]], Tensor]:
    """Logits of the checkpoint that was made from `source`, by transformers."""
    prefix, *parts = NAMES.get(family, USUAL)
    rule = rule_of(form, checkpoint, prefix, tuple(parts))
    floats = load_file(source / "model.safetensors")
    found = Reference(source, checkpoint.weights, rule)
    for index, layer in enumerate(found.model.model.layers):
        if not hasattr(layer.mlp, "experts"):
            continue
        names = [
            [f"model.layers.{index}.{prefix}.{expert}.{part}" for part in parts]
            for expert in range(layer.mlp.experts.num_experts)
        ]
        weights = [
            tuple(checkpoint.weights.get(n, floats.get(f"{n}.weight")).float() for n in own)
            for own in names
        ]
        layer.mlp.experts = RoundingExperts(weights, [rule(names[0][0]), rule(names[0][2])])
    return found.logits


def rule_of(
    form: str, checkpoint: Checkpoint, prefix: str, parts: tuple[str, ...]
) -> Callable[[str], Rule | None]:
    """As `quantised_folders.rule_of`; a static scale is the largest of all experts."""
    fused = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), parts[:2])

    def rule(module: str) -> Rule | None:
        if module not in checkpoint.weights or form.startswith(FLOAT_INPUT):
            return None
        if module.endswith(WIDENED) or (
            form.endswith("blocks") and len(checkpoint.weights[module]) % 128
        ):
            return None
        if form not in STATIC:
            return Rule(group=128) if form.endswith("blocks") else Rule()
        stem, _, last = module.rpartition(".")
        group = next((each for each in fused if last in each), (last,))
        if f".{prefix}." in module:
            stem = stem.rpartition(".")[0]
        scales = [
            float(tensor)
            for name, tensor in checkpoint.tensors.items()
            if name.startswith(f"{stem}.")
            and name.endswith(tuple(f".{g}.input_scale" for g in group))
        ]
        return Rule(scale=max(scales))

    return rule


# -- MXFP4 --------------------------------------------------------------------------------------


def write_mxfp4(source: Path, folder: Path, floats: Path) -> None:
    """Writes the float gpt-oss in `source` as it is published, with experts in MXFP4, into
    `folder`, and what its tensors stand for into `floats`."""
    published: dict[str, Tensor] = {}
    same: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            published[name] = same[name] = tensor
            continue
        codes, exponents, numbers = _mxfp4(tensor.transpose(1, 2).numpy())
        pairs = np.ascontiguousarray(codes[..., 0::2] | codes[..., 1::2] << 4)
        published[f"{name}_blocks"] = torch.from_numpy(pairs)
        published[f"{name}_scales"] = torch.from_numpy(np.ascontiguousarray(exponents))
        same[name] = torch.from_numpy(numbers).float().transpose(1, 2).contiguous()
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    write(source, folder, Checkpoint(published, config))
    write(source, floats, Checkpoint(same, None))


def _mxfp4(weight: np.ndarray) -> tuple[np.ndarray, ...]:
    """[E, N, K] -> codes [E, N, K / 32, 32], exponents [E, N, K / 32], numbers [E, N, K]."""
    groups = weight.astype(np.float64).reshape(*weight.shape[:2], -1, 32)
    power = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scaled = groups / np.exp2(power)[..., None]
    size = np.abs(np.abs(scaled)[..., None] - E2M1).argmin(-1)
    codes = (size + 8 * (scaled < 0)).astype(np.uint8)
    numbers = np.where(scaled < 0, -1, 1) * E2M1[size] * np.exp2(power)[..., None]
    return codes, (power + 127).astype(np.uint8), numbers.reshape(weight.shape)


def write_config(folder: Path, **changes: object) -> None:
    """Changes entries of the description of a quantised checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def scaled(folder: Path, factors: Mapping[str, float]) -> Path:
    """Multiplies the weights of a float folder, by the ends of their names."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        for end, factor in factors.items():
            if name.endswith(end):
                tensor *= factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
