"""Folders of quantised checkpoints, made from a float one, and how their inputs are rounded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from precision_reference import Reference, Rule
from quantised_checkpoints import Checkpoint, quantised
from safetensors.torch import load_file, save_file

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections with one product, whose input has one scale."""
FLOAT_INPUT = ("pack", "awq", "gptq", "compressed-tensors-float-input")
"""Beginnings of the names of forms that do not round inputs."""
STATIC = ("compressed-tensors-tensor-static", "fp8-static", "modelopt-fp8", "modelopt-fp8-config")


def write_quantised(
    source: Path,
    folder: Path,
    form: str,
    *,
    skip: Sequence[str] = (),
    input_scales: Mapping[str, float] | None = None,
) -> Checkpoint:
    """Writes the float checkpoint in `source` (one shard) into `folder`, in one of `FORMS`.

    `input_scales`: of static forms, by module; those not named keep the kit's.
    """
    checkpoint = quantised(load_file(source / "model.safetensors"), form, skip)
    for module, scale in (input_scales or {}).items():
        if (tensor := checkpoint.tensors.get(f"{module}.input_scale")) is not None:
            tensor.fill_(scale)
    write(source, folder, checkpoint)
    return checkpoint


def write(source: Path, folder: Path, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint's files, and those of `source` that are no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != "baton.json":
            shutil.copy(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    if checkpoint.config is not None:
        config["quantization_config"] = checkpoint.config
    for name, content in {"config.json": config, **checkpoint.files}.items():
        (folder / name).write_text(json.dumps(content))
    save_file(checkpoint.tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rule_of(form: str, checkpoint: Checkpoint) -> Callable[[str], Rule | None]:
    """How a form's products round their inputs, by module."""

    def rule(module: str) -> Rule | None:
        if module not in checkpoint.weights or form.startswith(FLOAT_INPUT):
            return None
        if form in STATIC:
            names = (f"{each}.input_scale" for each in _sharing(module))
            return Rule(scale=max(float(checkpoint.tensors[name]) for name in names))
        return Rule(group=128) if form.endswith("blocks") else Rule()

    return rule


def reference_of(source: Path, form: str, checkpoint: Checkpoint) -> Reference:
    """The reference of a quantised checkpoint that was made from `source`."""
    return Reference(source, checkpoint.weights, rule_of(form, checkpoint))


def fp8_reference(source: Path) -> Reference:
    """The reference of `quantization="fp8"`. Gates of a delta rule stay as they are."""
    gates = "in_proj_a", "in_proj_b", "in_proj_ba"
    return Reference(source, "fp8", lambda name: None if name.endswith(gates) else Rule())


def calibrated(source: Path, ids: Sequence[int]) -> dict[str, float]:
    """Scales of the inputs of all projections, from the largest values that these tokens give."""
    most: dict[str, float] = {}

    def look(name: str) -> Callable[..., None]:
        def note(_: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            most[name] = max(most.get(name, 0.0), float(arguments[0].abs().max()))

        return note

    reference = Reference(source, {}, lambda _: None)
    for name, module in reference.model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(look(name))
    reference.logits(ids)
    return {name: value / 448 for name, value in most.items()}


def _sharing(module: str) -> list[str]:
    prefix, _, last = module.rpartition(".")
    for group in FUSED:
        if last in group:
            return [f"{prefix}.{each}" for each in group]
    return [module]
