"""How a checkpoint pools: what its folder says, and its head that scores.

sentence-transformers writes the modules behind the model into `modules.json`, each with a folder
and a `config.json` of its own (https://sbert.net/docs/package_reference/base/modules.html). A model
without that file pools its last token and normalises it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.gguf_header import CheckpointError
from engine.pooling.requests import PoolKind

SCORE: Final = "score.weight"
"""The tensor of the head that scores, of transformers' classes for classification."""
CLASSIFIES: Final = "ForSequenceClassification"
_KINDS: Final = {"lasttoken": PoolKind.LAST, "mean": PoolKind.MEAN, "cls": PoolKind.FIRST}
_SWITCHES: Final = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Older files have a switch for each kind, newer ones name the kind."""
_KNOWN: Final = ("Transformer", "Pooling", "Normalize", "LogitScore")
_MOST_BYTES: Final = 1 << 20
"""Bytes of a file of JSON in the folder; the real ones have some hundred."""


@dataclass(frozen=True, slots=True)
class PoolingDefaults:
    """How a model pools where a request does not say."""

    kind: PoolKind = PoolKind.LAST
    normalise: bool = True
    width: int = 0
    """Numbers of an embedding; 0: the engine pools nothing."""
    labels: int = 0
    """Scores of the checkpoint's head; 0: it has none."""
    by_turns: bool = False
    """Whether a pair to be scored is a chat, with turns of the roles query and document."""
    generates: bool = True
    """Whether the model has a head that draws tokens."""


class Folder(NamedTuple):
    """What a folder says of pooling."""

    kind: PoolKind = PoolKind.LAST
    normalise: bool = True
    true_id: int | None = None
    """The score of a pair is the logit of this token, less that of the next one."""
    false_id: int | None = None


def read_folder(folder: Path) -> Folder:
    """Reads `modules.json` and the folders that it names.

    Raises:
        CheckpointError: it cannot be read, or names a module that the engine does not run.
    """
    if not (file := folder / "modules.json").is_file():
        return Folder()
    modules = _json(file)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise CheckpointError(f"{file} is no list of modules")
    found = Folder(normalise=False)
    for module in modules:
        kind = str(module.get("type")).rpartition(".")[2]
        if kind not in _KNOWN:
            raise CheckpointError(
                f"{file} names a module {kind}; those that can be run are {', '.join(_KNOWN)}"
            )
        own = folder / Path(str(module.get("path") or "")).name / "config.json"
        if kind == "Normalize":
            found = found._replace(normalise=True)
        elif kind == "Pooling":
            found = found._replace(kind=_kind(own))
        elif kind == "LogitScore":
            stated = _object(own)
            ids = [stated.get(f"{name}_token_id") for name in ("true", "false")]
            found = found._replace(true_id=_id(own, ids[0]), false_id=_id(own, ids[1]))
            if found.true_id is None:
                raise CheckpointError(f"{own} has no true_token_id")
    return found


def _kind(file: Path) -> PoolKind:
    stated = _object(file)
    named = stated.get("pooling_mode")
    names = [named] if isinstance(named, str) else named
    if names is None:
        names = [name for switch, name in _SWITCHES.items() if stated.get(switch)]
    if not isinstance(names, list | tuple) or len(names) != 1 or names[0] not in _KINDS:
        raise CheckpointError(f"{file}: pooling can be one of {', '.join(_KINDS)}")
    return _KINDS[names[0]]


def _id(file: Path, value: Any) -> int | None:
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
        raise CheckpointError(f"{file}: an id of a token is no number")
    return value


def _object(file: Path) -> Mapping[str, Any]:
    stated = _json(file)
    if not isinstance(stated, dict):
        raise CheckpointError(f"{file} is no object of JSON")
    return stated


def _json(file: Path) -> Any:
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{file} is larger than {_MOST_BYTES} bytes")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON") from error


def score_head(
    found: Folder, names: Mapping[str, Any], head: str, row: Callable[[str, int | None], Any]
) -> NDArray[np.float32] | None:
    """The head that scores, [L, H]; None: the checkpoint has none.

    Args:
        found: what the folder says.
        names: the checkpoint's tensors.
        head: name of the tensor that draws tokens.
        row: reads a tensor, or one row of it, as float32.
    """
    if SCORE in names:
        return np.asarray(row(SCORE, None), np.float32)
    if found.true_id is None:
        return None
    rows = np.asarray(row(head, found.true_id), np.float32)
    if found.false_id is not None:
        rows = rows - np.asarray(row(head, found.false_id), np.float32)
    return rows.reshape(1, -1)
