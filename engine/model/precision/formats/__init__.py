"""Formats of quantised checkpoints, by what they say of themselves in their config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from engine.model.config import UnsupportedModelError, read_json
from engine.model.precision.base import Format
from engine.model.precision.formats.awq import read_awq
from engine.model.precision.formats.compressed_tensors import read_compressed_tensors
from engine.model.precision.formats.fp8 import read_fp8
from engine.model.precision.formats.gptq import read_gptq
from engine.model.precision.formats.modelopt import read_modelopt
from engine.model.precision.formats.mxfp4 import read_mxfp4
from engine.model.precision.formats.names import EMBEDDING, HEAD
from engine.model.precision.formats.settings import Settings

READERS: dict[str, Callable[[Settings], Format]] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "modelopt": read_modelopt,
    "awq": read_awq,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
"""By `quant_method`."""
KEYS = ("quantization_config", "compression_config")
"""Where config.json has the description."""
MODELOPT_FILE = "hf_quant_config.json"


def read_format(stated: Mapping[str, Any], folder: Path, head: str = HEAD) -> Format | None:
    """The format of a checkpoint; None: its weights are float tensors.

    Args:
        stated: the content of config.json.
        folder: the checkpoint's folder, where ModelOpt may have a file of its own.
        head: the head's name in the checkpoint. Descriptions may have it, or the usual one.

    Raises:
        UnsupportedModelError: it is quantised in a way that is not supported.
        ModelError: ModelOpt's file cannot be read.
    """
    settings = _description(stated, folder)
    if settings is None:
        return None
    form = READERS[_method(settings)](settings)
    for module in (HEAD, EMBEDDING):
        names = {module, head} if module == HEAD else {module}
        if all(form.scheme(name) is not None for name in names):
            raise UnsupportedModelError(
                f"{settings.where} quantises {module}, which is not supported; supported are"
                " checkpoints that leave it out (ignore, exclude_modules)"
            )
    return form


def _description(stated: Mapping[str, Any], folder: Path) -> Settings | None:
    for key in KEYS:
        if stated.get(key):
            return Settings("config.json:", stated).inner(key)
    if (folder / MODELOPT_FILE).is_file():
        return Settings(f"{MODELOPT_FILE}:", read_json(folder / MODELOPT_FILE))
    return None


def _method(settings: Settings) -> str:
    """`quant_method`, or what the description must be of if it does not say."""
    guess = "modelopt" if settings.where.startswith(MODELOPT_FILE) else None
    guess = "compressed-tensors" if settings.get("config_groups") and not guess else guess
    return str(settings.one_of("quant_method", tuple(READERS), guess))
