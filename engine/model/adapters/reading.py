"""Reads an adapter's tensors: safetensors alone, and just what the model and the config ask for.

Shapes: N outputs and K inputs of a product, R the rank.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.adapters.types import Adapter, AdapterError, AdapterUnreadError, LowRank
from engine.model.adapters.config import (
    ALL_LINEAR,
    CONFIG,
    LoraConfig,
    Rules,
    open_within,
    read_lora_config,
)
from engine.model.places import FLOATS

log = logging.getLogger("baton.engine")

TENSORS: Final = "adapter_model.safetensors"
_NAME: Final = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_TAIL: Final = re.compile(r"(?:^|.*\.)(layers\.\d+\..+)")
_PREFIXES: Final = (
    "",
    "model.",
    "language_model.",
    "model.language_model.",
    "language_model.model.",
)
"""What may stand before `layers`: libraries name the same body so, and other towers otherwise."""


class Limits(NamedTuple):
    """What an adapter may have."""

    most_rank: int
    most_bytes: int
    """Bytes of its file, at most."""


def read_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    limits: Limits,
    dtype: torch.dtype,
    within: Path | None = None,
) -> Adapter:
    """Reads a folder.

    Args:
        folder: with peft's two files.
        shapes: (N, K) of the products that may have a pair, by names in the model's checkpoint.
        limits: of the worker.
        dtype: in which pairs are kept.
        within: as in `open_within`.

    Raises:
        AdapterUnreadError: its files cannot be read.
        AdapterError: it does not fit; the field or tensor is named.
    """
    config, file = look_at(folder, limits, within)
    rules = Rules(config)
    try:
        with open_within(file, within) as opened:  # Once, so that what is hashed is what is used.
            content = opened.read(limits.most_bytes + 1)
    except OSError as error:
        raise AdapterUnreadError(f"{file} cannot be read") from error
    if len(content) > limits.most_bytes:
        raise AdapterError(
            f"{file} has more than the {limits.most_bytes >> 20} MiB that are allowed"
            " (adapters_host_gib)"
        )
    digest = hashlib.sha256(config.canonical())
    digest.update(content)
    modules = _read(_tensors(content, file), shapes, rules, limits, dtype)
    missing = [name for name in shapes if config.targets != ALL_LINEAR and rules.targets(name)]
    missing = [name for name in missing if name not in modules]
    if missing:
        raise AdapterError(
            f"{CONFIG}: target_modules name {len(missing)} products without a pair in {TENSORS},"
            f" such as {missing[0]}"
        )
    for name in ("tokenizer_config.json", "chat_template.jinja", "added_tokens.json"):
        if (folder / name).is_file():
            log.info("adapter %s: its %s is not read: the model's own is used", folder.name, name)
    rank = max(len(pair.a) for pair in modules.values())
    return Adapter(digest.digest(), modules, rank, config.base)


def look_at(folder: Path, limits: Limits, within: Path | None = None) -> tuple[LoraConfig, Path]:
    """What can be said of a folder without the model: its config, and the file of its tensors.

    Raises: as `read_adapter`.
    """
    config, file = read_lora_config(folder, within), folder / TENSORS
    if not file.is_file():
        others = sorted(each.name for each in folder.glob("adapter_model*"))
        has = f", but {others[0]}" if others else ""
        raise AdapterUnreadError(f"{folder} has no {TENSORS}{has}: only safetensors are read")
    if not config.ranks:
        _check_rank(config.rank, limits)
    return config, file


def _check_rank(rank: int, limits: Limits) -> None:
    if rank > limits.most_rank:
        raise AdapterError(
            f"{CONFIG}: r {rank} is above the {limits.most_rank} of this worker (max_adapter_rank)"
        )


def _tensors(content: bytes, file: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(content)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that torch lacks.
        raise AdapterError(f"{file} is damaged or no safetensors file") from error
    return tensors


def _read(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, int]],
    rules: Rules,
    limits: Limits,
    dtype: torch.dtype,
) -> dict[str, LowRank]:
    known = {_short(name): name for name in shapes}
    halves: dict[str, dict[str, Tensor]] = {}
    fulls: dict[str, str] = {}
    for tensor, values in sorted(tensors.items()):
        name, half, full = _place(tensor, known)
        _check(tensor, half, values, shapes[name], rules.rank(full), limits)
        if not rules.targets(full):
            raise AdapterError(f"{CONFIG}: target_modules do not name {full}, which has {tensor}")
        if fulls.setdefault(name, full) != full or half in halves.get(name, {}):
            raise AdapterError(f"{TENSORS}: {tensor} is a second lora_{half} of {name}")
        halves.setdefault(name, {})[half] = values.to(dtype)
    found: dict[str, LowRank] = {}
    for name, own in halves.items():
        if not {"A", "B"} <= own.keys():
            lacks = "B" if "A" in own else "A"
            raise AdapterError(f"{TENSORS}: {name} has no lora_{lacks}")
        for half in ("A", "B"):
            if not bool(torch.isfinite(own[half]).all()):
                raise AdapterError(
                    f"{TENSORS}: lora_{half} of {name} has numbers that are not finite"
                )
        found[name] = LowRank(own["A"], own["B"], rules.scale(fulls[name]))
    if not found:
        raise AdapterError(f"{TENSORS} has no tensors")
    return found


def _place(tensor: str, known: Mapping[str, str]) -> tuple[str, str, str]:
    """The model's name of a tensor's module, which half of the pair it is, and peft's name."""
    found = _NAME.fullmatch(tensor)
    if found is None:
        raise AdapterError(
            f"{TENSORS}: {tensor} is neither lora_A nor lora_B of a product; embeddings, heads,"
            " biases and whole modules cannot be had"
        )
    name = known.get(_short(found[1]))
    if name is None:
        raise AdapterError(
            f"{TENSORS}: {found[1]} can have no pair here: products of attention and of"
            " feed-forwards can, experts, routers, states, embeddings and heads cannot"
        )
    return name, found[2], found[1]


def _short(name: str) -> str:
    """A module's name from `layers` on, if what stands before it is a body's."""
    found = _TAIL.fullmatch(name)
    if found is None or name.removesuffix(found[1]) not in _PREFIXES:
        return name
    return found[1]


def _check(
    tensor: str, half: str, values: Tensor, shape: tuple[int, int], rank: int, limits: Limits
) -> None:
    found, (outputs, inputs) = tuple(values.shape), shape
    wanted = (rank, inputs) if half == "A" else (outputs, rank)
    if found != wanted:
        raise AdapterError(
            f"{TENSORS}: {tensor} has shape {list(found)}, the model and rank say {list(wanted)}"
        )
    _check_rank(rank, limits)
    if values.dtype not in FLOATS:
        kind = str(values.dtype).removeprefix("torch.")
        raise AdapterError(f"{TENSORS}: {tensor} is {kind}; float32, float16 and bfloat16 are read")
