"""Loads weights from a Hugging Face folder (safetensors), a GGUF file, or a seed.

Tensors go one at a time straight into the model's own (fused) weights, so there is never a second
copy of the model in memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoints import CheckpointError, Weights
from engine.model.config import (
    ModelConfig,
    ModelError,
    Unread,
    UnsupportedModelError,
    named_as,
    read_json,
)
from engine.model.decoder import ALL, Layer, Model
from engine.model.drafts.loading import LoadedHead
from engine.model.families import read_config
from engine.model.gguf import GgufFile
from engine.model.places import Accepts, Load, Place, Progress, check_tensors, fill, of_norm, plain
from engine.model.places import Check as Check
from engine.model.precision.base import Format
from engine.model.precision.choice import Precision
from engine.model.precision.formats import read_format
from engine.model.ranks import banded, check_ranks, staged
from engine.model.region import Range
from engine.model.shard import Shard
from engine.model.sources import Dummy, Safetensors, Source, locate
from engine.model.wrapped import loading as wrapped
from engine.model.wrapped.decoder import WrappedModel
from engine.model.wrapped.loading import Outline, outline
from engine.pooling.checkpoint import (
    CLASSIFIES,
    SCORE,
    Folder,
    PoolingDefaults,
    read_folder,
    score_head,
)
from engine.step.collective import Collective
from engine.step.dispatch import STAY, Dispatch
from engine.step.stages import Stages

log = logging.getLogger("baton.engine")

_ROWS_COMPARED = 4096
"""Rows of embedding and head that are read at once to compare them."""
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
MODEL_IMPLS = ("auto", "native", "transformers")
Decoder = Model | WrappedModel
"""What runs a model: our decoder, or transformers' own code."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run."""

    model: Decoder
    config: ModelConfig
    revision: str
    """Digest of the config and of the first and last row of every tensor that was read."""
    path: str
    """The folder from which it was loaded."""
    precision: str = ""
    """The format of quantised weights, or the `quantization`; empty: float."""
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)
    score_head: NDArray[np.float32] | None = None
    """[L, H]. The head that scores; None: the checkpoint has none."""
    head: LoadedHead | None = None
    """What drafts for it; None: nothing that has weights."""
    adapters: object | None = None
    """Where adapters add to it (`engine.parts.adapters`); None: it takes none."""
    whole: Model | None = None
    """All layers, without memory, where a stage has some of them."""


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    quantization: str = "",
    model_impl: str = "auto",
    max_context_tokens: int = 0,
    accepts: Accepts | None = None,
    check: Check | None = None,
    progress: Progress | None = None,
    shard: Shard = ALL,
    collective: Collective | None = None,
    stages: Stages | None = None,
    stage_layers: tuple[int, ...] = (),
    dispatch: Dispatch = STAY,
) -> LoadedModel:
    """Builds the model, or a rank's part of it, and fills in its weights.

    Args:
        path: folder or GGUF file.
        dtype: dtype of the weights in memory.
        device: device of the weights.
        load_format: one of `LOAD_FORMATS`. auto: GGUF if the path is a GGUF file or has no other
            weights.
        seed: seed of dummy weights; equal seeds give equal weights in every process.
        quantization: "fp8" rounds the weights of the layers' products while they are loaded.
        model_impl: one of `MODEL_IMPLS`. native: by a file of ours; transformers: through
            transformers' own code; auto: native where there is a file that reads the model.
        max_context_tokens: the longest context that will be computed; 0: what the model allows.
        accepts: a draft head's; is called before `check`, and what it raises goes through.
        check: is called before the memory of the weights is taken; what it raises goes through.
        progress: called with ("weights", tensors done, tensors in all).
        shard: the part that is loaded. Nothing else of the weights is kept or read, but the ends of
            each tensor for the revision, which does not depend on it.
        collective: sums up with the ranks that hold the other parts of a stage.
        stages: hands hidden states on.
        stage_layers: layers of each stage, the first one first; empty: stages are equally large.
        dispatch: moves tokens to experts that other workers hold.

    Raises:
        UnsupportedModelError: the engine does not support this model, or not so many ranks.
        ModelError: files are missing, or do not fit the config.
    """
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load format {load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
    folder, gguf = locate(path, load_format)
    pools, is_dummy = _pools(folder), load_format == "dummy"
    reporting = accepts, check, progress
    how = dtype, device, is_dummy, seed, quantization
    load = Load(*how, *reporting, shard, collective, stages, stage_layers, dispatch)
    if gguf is not None:
        if model_impl == "transformers":
            raise UnsupportedModelError("GGUF files are not read through transformers' own code")
        file = GgufFile(gguf)
        return _load_native(folder, file.config(max_context_tokens), load, pools, file)
    chosen = choose(folder, model_impl, dtype, max_context_tokens)
    if isinstance(chosen, ModelConfig):
        return _load_native(folder, chosen, load, pools)
    _check_wrapped(load)
    found, own = wrapped.load(folder, chosen, load), chosen.config
    defaults = PoolingDefaults(pools.kind, pools.normalise, own.hidden_size)
    return LoadedModel(found.model, own, found.revision, str(folder), found.precision, defaults)


def _check_wrapped(load: Load) -> None:
    """Refuses what transformers' own code has not."""
    if load.accepts is not None:
        raise UnsupportedModelError(
            "a draft head reads what enters some layers, and transformers' own code runs this"
            " model: set speculation to suffix, or to off"
        )
    if load.shard.stages > 1:
        raise UnsupportedModelError(
            f"pp {load.shard.stages} cannot be set: transformers' own code runs this model, and its"
            " layers are not divided among stages"
        )
    if load.shard.bands > 1:
        raise UnsupportedModelError(
            f"kv_bands {load.shard.bands} cannot be set: transformers' own code runs this model"
        )
    if load.shard.experts is not None:
        raise UnsupportedModelError(
            "expert_parallel and expert_group cannot be set: transformers' own code runs this"
            " model, and its experts are not divided"
        )


def _load_native(
    folder: Path, config: ModelConfig, load: Load, pools: Folder, file: GgufFile | None = None
) -> LoadedModel:
    """Fills our decoder."""
    dtype, device, generates = load.dtype, load.device, True
    source: Source | None = file
    if source is None and not load.dummy:
        source = Safetensors(folder)
        config = named_as(config, source.headers.keys())
        config = replace(config, tie_embeddings=_ties(config, source, dtype))
        config, generates = _without_head(config, source, folder)
    form = None if file else read_format(read_json(folder / "config.json"), folder, config.head)
    precision = Precision(device, dtype, form, load.quantization)
    check_ranks(config, precision, load.shard)
    if load.accepts is not None:
        load.accepts(config)
    shard, every = load.shard, None
    if shard.stages > 1 or shard.experts is not None or shard.bands > 1:
        every = Model(config, dtype, torch.device("meta"), precision)
        if shard.stages > 1:
            shard = staged(every, shard, load.stage_layers)
        if shard.bands > 1:
            shard = banded(every, shard)
    if load.check is not None:
        load.check(_weights(config, dtype, precision, shard))
    model = Model(
        config, dtype, device, precision, shard, load.collective, load.stages, load.dispatch
    )
    precision.log_widened()
    if load.dummy or source is None:
        whole = list(_places(every or model, None, ()))
        source, form = Dummy(_shapes(whole), load.seed, dtype, device), None
    else:
        whole = list(_places(every or model, form, source.headers))
        _check(whole, source, form, config)
    places = whole if every is None else list(_places(model, form, source.headers))
    revision = fill(places, source, asdict(config), load.progress, whole)
    loaded = LoadedModel(model, config, revision, str(folder), precision.name, whole=every)
    return _with_pooling(loaded, pools, source, generates=generates)


def choose(
    folder: Path, model_impl: str, dtype: torch.dtype, max_context_tokens: int = 0
) -> ModelConfig | Outline:
    """What a folder's model is to us: the features that a file of ours reads, or a class of
    transformers. Arguments and errors are those of `load_model`."""
    if model_impl not in MODEL_IMPLS:
        raise ModelError(f"model_impl {model_impl!r} is not one of {', '.join(MODEL_IMPLS)}")
    if model_impl == "native":
        return read_config(folder, max_context_tokens)
    if model_impl == "transformers":
        return outline(folder, dtype)
    try:
        return read_config(folder, max_context_tokens)
    except UnsupportedModelError as native:
        try:
            found = outline(folder, dtype)
        except ModelError as error:
            raise UnsupportedModelError(f"{native}; {error}") from error
        log.info("%s runs through transformers' own code: no file of ours reads it", found.name)
        return found


def _weights(
    config: ModelConfig, dtype: torch.dtype, precision: Precision, shard: Shard
) -> Weights:
    """Counts a rank's weights without memory for them."""
    model = Model(config, dtype, torch.device("meta"), precision, shard)
    kept = [*model.parameters(), *model.buffers()]
    own = [each for each in kept if each.dtype == dtype]
    others = [each for each in kept if each.dtype != dtype]
    return Weights(
        count=sum(each.numel() for each in own),
        tied=model.embedding.numel() if config.tie_embeddings else 0,
        outside=model.embedding.numel() + (0 if config.tie_embeddings else model.head.numel()),
        packed_bytes=sum(each.numel() * each.element_size() for each in others),
    )


# -- pooling ------------------------------------------------------------------------------------


def _pools(folder: Path) -> Folder:
    try:
        return read_folder(folder)
    except CheckpointError as error:
        raise ModelError(str(error)) from error


def _without_head(
    config: ModelConfig, source: Safetensors, folder: Path
) -> tuple[ModelConfig, bool]:
    """The model with the features of a checkpoint that draws no tokens, and whether it does draw
    some. There is no memory for a head that is not there."""
    names = read_json(folder / "config.json").get("architectures") or []
    scores = any(name.endswith(CLASSIFIES) for name in names)
    lacks = _ends(config)[1] not in source.headers and not config.tie_embeddings
    lacks = lacks and (scores or source.is_bare)
    if SCORE in source.headers:
        config = replace(config, unread=(*config.unread, Unread(SCORE, "the head that scores")))
    return replace(config, tie_embeddings=config.tie_embeddings or lacks), not (scores or lacks)


def _with_pooling(
    loaded: LoadedModel, pools: Folder, source: Source, *, generates: bool
) -> LoadedModel:
    """The model with what its checkpoint has for pooling. Its revision depends on that."""
    embedding, head = _ends(loaded.config)

    def row(name: str, index: int | None) -> NDArray[np.float32]:
        where = () if index is None else (Range(index, index + 1),)
        found: NDArray[np.float32] = source.read(name, *where).float().cpu().numpy()
        return found

    drawing = head if head in source.headers else embedding
    found = score_head(pools, source.headers, drawing, row)
    revision = loaded.revision
    if found is not None:
        revision = hashlib.sha256(revision.encode() + found.tobytes()).hexdigest()[:16]
    width, labels = loaded.config.hidden_size, 0 if found is None else len(found)
    by_turns = pools.true_id is not None
    defaults = PoolingDefaults(pools.kind, pools.normalise, width, labels, by_turns, generates)
    return replace(loaded, revision=revision, pooling=defaults, score_head=found)


# -- places of a checkpoint's tensors -----------------------------------------------------------


def _places(model: Model, form: Format | None, there: Collection[str]) -> Iterator[Place]:
    """All parts of the model, in a fixed order. `form`: the format of quantised weights. `there`:
    names of the checkpoint's tensors."""
    config, shard = model.config, model.shard
    embedding, head = _ends(config)
    if config.tie_embeddings and embedding not in there and head in there:
        embedding = head  # One of the two is enough, whichever it is.
    if shard.is_first:
        yield plain(embedding, model.embedding)
    yield of_norm(f"{config.body}.{config.last_norm}", model.norm)
    if shard.is_last and not model.shares_head:
        name = embedding if config.tie_embeddings else head
        yield plain(name, model.head, shard.vocab(config), whole=config.vocab_size)
    if model.inputs is not None:
        yield from model.inputs.places(form, shard)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        yield from layer.places(form, shard)


def _ends(config: ModelConfig) -> tuple[str, str]:
    """The names of embedding and head."""
    return f"{config.body}.{config.embedding}.weight", f"{config.head}.weight"


def _ties(config: ModelConfig, source: Source, dtype: torch.dtype) -> bool:
    """Whether the embedding is also the head. As in transformers it is not where a checkpoint has
    both and they differ, whatever its config says."""
    names = _ends(config)
    if not config.tie_embeddings or not all(name in source.headers for name in names):
        return config.tie_embeddings
    rows, *others = (source.headers[name].shape[0] for name in names)
    if others != [rows]:
        return False  # The shape will be refused.
    for at in range(0, rows, _ROWS_COMPARED):
        where = Range(at, min(at + _ROWS_COMPARED, rows))
        embedding, head = (source.read(name, where).to(dtype) for name in names)
        if not torch.equal(embedding, head):
            log.warning("the config ties the head to the embedding, and the checkpoint has two")
            return False
    return True


def _shapes(places: list[Place]) -> dict[str, tuple[int, ...]]:
    return {name: spec.shape for place in places for name, spec in place.specs.items()}


def _check(places: list[Place], source: Source, form: Format | None, config: ModelConfig) -> None:
    """Compares the tensors that the model needs with what the checkpoint says of its own."""
    wanted = {name: spec for place in places for name, spec in place.specs.items()}
    others = _beside(source.headers.keys() - wanted.keys(), config)
    unused = {name for name in others if form is not None and form.is_unused(name)}
    if unused:
        log.info(
            "%d tensors are ignored, such as %s (FP8 KV takes no scales of a checkpoint)",
            len(unused),
            min(unused),
        )
    missing = sorted(wanted.keys() - source.headers.keys())
    extra = sorted(
        name
        for name in others
        if not name.endswith("rotary_emb.inv_freq")
        and not (config.tie_embeddings and name.endswith("lm_head.weight"))
        and name not in unused
    )
    if missing or extra:
        raise ModelError(
            f"the checkpoint does not fit the config: {len(missing)} tensors missing"
            f" ({', '.join(missing[:3])}), {len(extra)} unknown ({', '.join(extra[:3])})"
        )
    check_tensors(wanted, source)
    _check_zeros(sorted(name for name in unused if form is not None and form.is_zero(name)), source)


def _beside(names: set[str], config: ModelConfig) -> set[str]:
    """Names that the model does not say to leave unread. The log has the others."""
    for unread in config.unread:
        found = {name for name in names if name.startswith(unread.prefix)}
        if found:
            log.info("%d tensors are not read: %s (%s*)", len(found), unread.what, unread.prefix)
        names = names - found
    return names


def _check_zeros(names: list[str], source: Source) -> None:
    """Reads tensors that the model has no place for."""
    for name in names:
        if source.read(name).float().count_nonzero():
            raise UnsupportedModelError(
                f"{name} is not zero, and this model adds no bias there; supported are"
                " checkpoints whose biases are those of the config, or zero"
            )
