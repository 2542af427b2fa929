"""Loads a decoder of transformers: its class, its dry run, its weights."""

from __future__ import annotations

import copy
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.checkpoints import Weights
from engine.model.config import (
    LayerConfig,
    ModelConfig,
    ModelError,
    WrappedConfig,
)
from engine.model.families import eos_tokens_of
from engine.model.families.sense import MOST_POSITIONS
from engine.model.linear import Build, RmsNorm
from engine.model.mixers.config import AttentionConfig
from engine.model.places import Load, Place, check_tensors, fill, of_linear, of_norm, plain
from engine.model.precision.choice import Precision
from engine.model.shard import Shard
from engine.model.sources import Dummy, Safetensors, Source
from engine.model.wrapped import attention, interfaces, linears, parts
from engine.model.wrapped.attention import QKV, Triple
from engine.model.wrapped.classes import find, refusal
from engine.model.wrapped.decoder import WrappedModel
from engine.model.wrapped.linears import Product
from engine.model.wrapped.parts import GATED, Replaced
from engine.model.wrapped.ranks import check_part, plan_of
from engine.model.wrapped.recording import Attended, Record, record
from engine.model.wrapped.tensors import (
    Origins,
    origins_of,
    own_names,
    place,
    targets_of,
    tied,
)
from engine.step.collective import Alone, Collective

log = logging.getLogger("baton.engine")


class Wrapped(NamedTuple):
    """A decoder ready to run."""

    model: WrappedModel
    revision: str
    precision: str


class Outline(NamedTuple):
    """A decoder without numbers."""

    causal: Any
    """A class of transformers, on the device `meta`."""
    record: Record
    config: ModelConfig

    @property
    def name(self) -> str:
        """Name of the class."""
        return self.config.architecture


def outline(folder: Path, dtype: torch.dtype) -> Outline:
    """Reads a config and does the dry run.

    Args:
        folder: of the model.
        dtype: of the weights.

    Raises:
        UnsupportedModelError: it cannot run here; the class and the reason are named.
        ModelError: there is no readable config.
    """
    interfaces.register()
    kind, config = find(folder)
    name = kind.__name__
    try:
        with _dtype(dtype), torch.device("meta"):
            causal = kind(config).eval()
    except Exception as error:  # Of any kind: it computes with what it has not checked.
        raise ModelError(f"{name}: {folder / 'config.json'} is not a valid config") from error
    found = record(name, causal)
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise refusal(name, "its config does not say how many positions it has")
    own = WrappedConfig(
        architecture=name,
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        norm_eps=0.0,
        max_position_embeddings=min(longest, MOST_POSITIONS),
        layers=tuple(LayerConfig(_mixer(call), None) for call in found.calls),
        body=found.body,
        eos_token_ids=eos_tokens_of(config, folder),
    )
    return Outline(causal, found, own)


@contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _mixer(call: Attended) -> AttentionConfig:
    return AttentionConfig(
        heads=call.heads,
        kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        rope=None,
        scale=call.scale,
        window=call.window,
        soft_cap=call.soft_cap,
        sinks=bool(call.sinks),
    )


def load(folder: Path, found: Outline, how: Load) -> Wrapped:
    """Fills an outline.

    Raises:
        UnsupportedModelError: the engine does not support so many ranks, or the precision.
        ModelError: tensors are missing, or do not fit.
    """
    causal, name, body = found.causal, found.name, found.record.body
    dtype, device, shard = how.dtype, how.device, how.shard
    plan = plan_of(name, causal, found.record, shard.count)
    shapes = {target: tuple(each.shape) for target, each in causal.state_dict().items()}
    wanted = shapes.keys()
    source: Source | None = None if how.dummy else Safetensors(folder)
    origins = own_names(causal) if source is None else origins_of(causal, source.headers)
    covered = _covered(causal, origins, source)
    causal.tie_weights(missing_keys=wanted - covered, recompute_mapping=False)
    _check_names(causal, origins, wanted - covered)
    precision = Precision(device, dtype, None, how.quantization)
    modules = {
        target.removesuffix(".weight"): origin.names[0].removesuffix(".weight")
        for target, origin in origins.by_target.items()
        if origin.conversion is None
    }
    ranks = how.collective or Alone()

    def replace(
        model: Any, calls: Sequence[Attended], where: torch.device, ranks: Collective
    ) -> Counter[str]:
        build = Build(dtype, where, precision, shard, ranks)
        ours = parts.replace(model, found.config, origins.by_target, build)
        ours += attention.replace(model, body, calls, origins.by_target, plan, build)
        linears.replace(model, body, modules, plan, build)
        return ours

    if how.check is not None or plan:
        counted = copy.deepcopy(causal)
        replace(counted, (), torch.device("meta"), Alone())
        if plan:
            check_part(name, counted, found.record, shard.count)
        if how.check is not None:
            how.check(_weights(counted, dtype))
    _take_buffers(causal, device)
    _log(name, replace(causal, found.record.calls, device, ranks))
    precision.log_widened()
    _take_memory(causal, device, dtype)
    if source is None:
        source = Dummy(shapes, how.seed, dtype, device)
    places = list(_places(causal, origins, source, shard))
    for place_ in places:
        check_tensors(place_.specs, source)
    stated = {"model": asdict(found.config), "config": causal.config.to_dict()}
    revision = fill(places, source, stated, how.progress)
    model = WrappedModel(found.config, causal, found.record, shard, ranks)
    return Wrapped(model, revision, precision.name)


# -- names --------------------------------------------------------------------------------------


def _covered(causal: Any, origins: Origins, source: Source | None) -> set[str]:
    """Parameters that tensors of the checkpoint fill."""
    found: set[str] = set()
    for target, origin in origins.by_target.items():
        headers = {} if source is None else source.headers
        found |= targets_of(causal, target, origin, headers)
    return found


def _check_names(causal: Any, origins: Origins, missing: set[str]) -> None:
    """Refuses a checkpoint that does not fill the class, or has more than it."""
    for names in tied(causal):
        if names - missing:
            missing = missing - names
    ignored = causal._keys_to_ignore_on_load_missing or ()
    missing = {name for name in missing if not any(re.search(each, name) for each in ignored)}
    extra = {name for name in origins.unknown if not name.endswith("rotary_emb.inv_freq")}
    if missing or extra:
        raise ModelError(
            f"the checkpoint does not fit the config: {len(missing)} tensors missing"
            f" ({', '.join(sorted(missing)[:3])}), {len(extra)} unknown"
            f" ({', '.join(sorted(extra)[:3])})"
        )


def _places(causal: Any, origins: Origins, source: Source, shard: Shard) -> Iterator[Place]:
    """All parts of the model that a checkpoint fills, in a fixed order."""
    whole: dict[str, Replaced | Triple] = {
        name: each for name, each in causal.named_modules() if isinstance(each, Replaced | Triple)
    }
    for target, origin in origins.by_target.items():
        name, _, last = target.rpartition(".")
        if (replaced := name.rpartition(".")[0]) in whole:
            if name.endswith((GATED[0], QKV[0])) and last == "weight":
                yield from whole[replaced].places(shard)
            continue
        owner = causal.get_submodule(name)
        if isinstance(owner, RmsNorm) and origin.conversion is None:
            yield of_norm(origin.names[0].removesuffix(".weight"), owner)
            continue
        own = None if isinstance(owner, Product) else getattr(owner, last)
        if origin.conversion is not None or (own is not None and own.dim() == 0):
            yield place(causal, target, origin, source.headers, partial(_assign, causal))
        elif own is not None:
            yield plain(origin.names[0], own)
        elif last == "weight":
            yield from of_linear(owner.linear, None, shard)


def _assign(causal: Any, tensors: dict[str, Tensor]) -> None:
    """Copies converted tensors into a model."""
    for target, tensor in tensors.items():
        name, _, last = target.rpartition(".")
        owner = causal.get_submodule(name)
        if isinstance(owner, Product) and last == "weight":
            region = owner.linear.parts[0].region
            owner.linear.method.fill(0, tensor[region.rows.slice, region.columns.slice])
            continue
        own = getattr(owner, last)
        if own.shape != tensor.shape:
            found, wanted = list(tensor.shape), list(own.shape)
            raise ModelError(f"{target} has shape {found}, the config says {wanted}")
        own.copy_(tensor)


# -- memory -------------------------------------------------------------------------------------


def _weights(causal: Any, dtype: torch.dtype) -> Weights:
    """Counts the weights of a model without memory."""
    kept = [*causal.parameters(), *causal.buffers()]
    own = [each for each in kept if each.dtype == dtype]
    others = [each for each in kept if each.dtype != dtype]
    embedding = causal.get_input_embeddings().weight
    head = causal.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding
    return Weights(
        count=sum(each.numel() for each in own),
        tied=embedding.numel() if is_tied else 0,
        outside=embedding.numel() + (0 if is_tied or head is None else head.weight.numel()),
        packed_bytes=sum(each.numel() * each.element_size() for each in others),
    )


def _take_buffers(causal: Any, device: torch.device) -> None:
    """Gives buffers memory, and their numbers to those that no checkpoint has."""
    stored = causal.state_dict().keys()
    for name, buffer in list(causal.named_buffers()):
        if buffer.is_meta:
            _put(causal, name, torch.empty_like(buffer, device=device))
    for name, each in [*causal.named_parameters(), *causal.named_buffers()]:
        if name in stored:
            each._is_hf_initialized = True
    with torch.no_grad(), device:
        causal.initialize_weights()


def _take_memory(causal: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Gives every parameter memory that is not ours."""
    wide = causal._get_dtype_plan(dtype)
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(causal.named_parameters(remove_duplicate=False)):
        parameter.requires_grad_(False)
        if parameter.device == device:
            continue
        kept = next((each for key, each in wide.items() if key in name), parameter.dtype)
        memory = torch.empty(parameter.shape, dtype=kept, device=device)
        own = made.setdefault(id(parameter), nn.Parameter(memory, requires_grad=False))
        _put(causal, name, own)


def _put(causal: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    setattr(causal.get_submodule(owner), last, tensor)


def _log(name: str, ours: Counter[str]) -> None:
    for each, count in sorted(ours.items()):
        log.info("%s: %d of %s are ours, as they answer alike", name, count, each)
