"""peft's `adapter_config.json`, read strictly: what would change the computation and is not built
is refused with field and value."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

from engine.adapters.types import AdapterError, AdapterUnreadError
from engine.model.config import UnsupportedModelError
from engine.model.precision.formats.expressions import Expressions

CONFIG: Final = "adapter_config.json"
ALL_LINEAR: Final = "all-linear"
_READ: Final = (
    *("peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("base_model_name_or_path", "init_lora_weights"),
)
_WITHOUT_EFFECT: Final = frozenset(
    {
        *("lora_dropout", "inference_mode", "task_type", "revision", "auto_mapping"),
        *("peft_version", "fan_in_fan_out", "megatron_config", "megatron_core", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        *("ensure_weight_tying",),
    }
)
"""Fields of training, and of variants that another field turns on."""
_STARTS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it was."""
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_SEGMENT: Final = re.compile(r".*?\.[^.]*\.(\d+)\.")


_Value = TypeVar("_Value", int, float)


class LoraConfig(NamedTuple):
    """What counts of a config."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | str
    """Names, or one expression for whole names."""
    excluded: tuple[str, ...] | str
    layers: frozenset[int] | None
    """None: all."""
    layers_names: tuple[str, ...]
    """What stands before a layer's number; empty: anything."""
    ranks: Mapping[str, int]
    """By expressions for the ends of names."""
    alphas: Mapping[str, float]
    by_root: bool
    """The scale is alpha / sqrt(rank), and not alpha / rank (rsLoRA)."""
    base: str

    def canonical(self) -> bytes:
        """What the digest takes of it: equal for equal computations."""
        own = self._asdict()
        del own["base"]
        own["layers"] = None if self.layers is None else sorted(self.layers)
        return json.dumps(own, sort_keys=True).encode()


class Rules:
    """Answers a config's questions about modules. Its expressions have a bound on time."""

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._expressions = Expressions()

    def targets(self, name: str) -> bool:
        """Whether a product has a pair.

        Raises:
            AdapterError: an expression cannot be matched.
        """
        config = self._config
        if self._is_named(config.excluded, name):
            return False
        if not self._is_named(config.targets, name):
            return False
        if config.layers is None or isinstance(config.targets, str):
            return True
        return self._layer(name) in config.layers

    def rank(self, name: str) -> int:
        """Rank of a module's pair."""
        return self._by_pattern(self._config.ranks, name, self._config.rank)

    def scale(self, name: str) -> float:
        """Factor of a module's pair."""
        rank = self.rank(name)
        alpha = self._by_pattern(self._config.alphas, name, self._config.alpha)
        return alpha / (math.sqrt(rank) if self._config.by_root else rank)

    def _is_named(self, names: tuple[str, ...] | str, name: str) -> bool:
        if isinstance(names, str):
            return names == ALL_LINEAR or (bool(names) and self._match(names, name))
        return any(name == each or name.endswith(f".{each}") for each in names)

    def _layer(self, name: str) -> int | None:
        if not self._config.layers_names:
            found = _SEGMENT.match(name)
            return int(found[1]) if found else None
        for each in self._config.layers_names:
            found = re.match(rf"(?:^|.*?\.){re.escape(each)}\.(\d+)\.", name)
            if found:
                return int(found[1])
        return None

    def _by_pattern(self, patterns: Mapping[str, _Value], name: str, usual: _Value) -> _Value:
        for pattern, value in patterns.items():
            if self._match(rf"(.*\.)?({pattern})", name):
                return value
        return usual

    def _match(self, pattern: str, name: str) -> bool:
        try:
            return self._expressions.match(pattern, name, r"\Z")
        except UnsupportedModelError as error:
            raise AdapterError(f"{CONFIG}: {error}") from error


def open_within(file: Path, within: Path | None) -> BinaryIO:
    """Opens a file that lies below a folder when it is opened: a link that takes the place of
    anything on the way, after it was looked at, is not followed.

    Args:
        file: may be a link itself, to a place in the folder.
        within: has no links in its path; None: the file may lie anywhere.

    Raises:
        AdapterError: it lies elsewhere.
        OSError: it cannot be opened.
    """
    if within is None:
        return file.open("rb")
    real = file.resolve()
    if not real.is_relative_to(within):
        raise AdapterError(f"{file} lies outside of {within}")
    *folders, name = real.relative_to(within).parts
    opened = os.open(within, _FOLDER)
    try:
        for each in folders:
            above, opened = opened, os.open(each, _FOLDER, dir_fd=opened)
            os.close(above)
        return os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=opened), "rb")
    finally:
        os.close(opened)


def read_lora_config(folder: Path, within: Path | None = None) -> LoraConfig:
    """Reads a folder's config. `within` is as in `open_within`.

    Raises:
        AdapterUnreadError: there is none, or it cannot be read.
        AdapterError: a field has a value that cannot be had.
    """
    try:
        with open_within(folder / CONFIG, within) as opened:
            found = json.loads(opened.read())
    except OSError as error:
        raise AdapterUnreadError(f"{folder} has no {CONFIG} that can be read") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{folder} has no {CONFIG} that can be read") from error
    if not isinstance(found, dict):
        raise AdapterError(f"{folder} has no {CONFIG} that can be read")
    if found.get("peft_type") != "LORA":
        raise _refused("peft_type", found.get("peft_type"), "LORA")
    if (start := found.get("init_lora_weights", True)) not in _STARTS:
        raise _refused(
            "init_lora_weights", start, "one that was trained on the base as it is (true, gaussian)"
        )
    if (bias := found.get("bias", "none")) != "none":
        raise _refused("bias", bias, "none")
    known = {*_READ, *_WITHOUT_EFFECT, "bias"}
    for field in sorted(found.keys() - known):
        if found[field] not in (None, False, [], {}, ""):
            raise _refused(field, found[field], "one without it")
    layers = found.get("layers_to_transform")
    return LoraConfig(
        rank=_count("r", found.get("r", 8)),
        alpha=_number("lora_alpha", found.get("lora_alpha", 8)),
        targets=_names("target_modules", found.get("target_modules"), wanted=True),
        excluded=_names("exclude_modules", found.get("exclude_modules")),
        layers=None if layers in (None, []) else _layers(layers),
        layers_names=_tuple("layers_pattern", found.get("layers_pattern")),
        ranks={k: _count("rank_pattern", v) for k, v in _pairs(found, "rank_pattern")},
        alphas={k: _number("alpha_pattern", v) for k, v in _pairs(found, "alpha_pattern")},
        by_root=_flag("use_rslora", found.get("use_rslora", False)),
        base=str(found.get("base_model_name_or_path") or ""),
    )


def _refused(field: str, value: Any, works: str) -> AdapterError:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    return AdapterError(f"{CONFIG}: {field} {shown} cannot be used here; what works: {works}")


def _count(field: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise _refused(field, value, "a whole number from 1 on")
    return value


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _refused(field, value, "a finite number")
    return float(value)


def _flag(field: str, value: Any) -> bool:
    if type(value) is not bool:
        raise _refused(field, value, "true or false")
    return value


def _names(field: str, value: Any, *, wanted: bool = False) -> tuple[str, ...] | str:
    if isinstance(value, str) and (value or not wanted):
        return value
    names = _tuple(field, value)
    if wanted and not names:
        raise _refused(field, value, "names of modules, an expression, or all-linear")
    return tuple(sorted(names))


def _tuple(field: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise _refused(field, value, "names")
    return tuple(value)


def _layers(value: Any) -> frozenset[int]:
    numbers = [value] if type(value) is int else value
    whole = isinstance(numbers, list) and all(type(each) is int and each >= 0 for each in numbers)
    if not whole:
        raise _refused("layers_to_transform", value, "numbers of layers")
    return frozenset(numbers)


def _pairs(found: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    value = found.get(field) or {}
    if not isinstance(value, dict):
        raise _refused(field, value, "values by names of modules")
    return list(value.items())
