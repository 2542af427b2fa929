"""Writes the tables of `models.md` from what the tests run: the tiny models of each family, the
configs of published checkpoints, and the recipes of this year."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from reference import table

ROOT: Final = Path(__file__).resolve().parents[2]
# Tables of families, which the matrices of tests run.
sys.path[:0] = [str(ROOT / "tests")]

from tiny_families import DENSE, EVERY, EXPERTS, FUSED, HYBRIDS, LATENTS, SLOW  # noqa: E402
from tiny_models import tiny_config  # noqa: E402

from engine.cuda.features import obstacle  # noqa: E402
from engine.groups.spec import split_layers  # noqa: E402
from engine.model import ModelConfig  # noqa: E402
from engine.model.families import FAMILIES, build_config  # noqa: E402
from engine.parts.paging import lives_of  # noqa: E402

PLAIN: Final[dict[str, dict[str, Any]]] = {
    "llama": {}, "mistral": {"family": "mistral"}, "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 32},
}  # fmt: skip
"""Families that every test of the engine knows."""
MEASURED: Final = frozenset({"llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text"})
"""Model types of which `bench/README.md` has figures of a GPU."""
UNSEEN: Final = frozenset({"glm_ocr", "kimi_k25"})
"""Tiny models with fused kernels that no GPU has run yet."""
PUBLISHED: Final = ROOT / "tests" / "engine" / "published.json"
RECIPES: Final = Path(__file__).with_name("recipes.json")


def families_table() -> str:
    """A row for each tiny model."""
    rows = [
        (f"`{FAMILIES[_type_of(name, options)].architecture}`", *_row(name, options))
        for name, options in {**PLAIN, **EVERY, **HYBRIDS}.items()
    ]
    header = ("class", "tested as", "on a CPU", "weights", "on a GPU", "groups of layers")
    return table(header, *rows)


def _type_of(name: str, options: dict[str, Any]) -> str:
    return str(options.get("family", name))


def _row(name: str, options: dict[str, Any]) -> Iterator[str]:
    kind = _type_of(name, options)
    config = build_config(FAMILIES[kind].reads_as or kind, tiny_config(**options), ())
    yield f"`{name}`"
    yield "every path" if name not in SLOW else "every path, in the matrix"
    quantised = {**PLAIN, **DENSE, **EXPERTS}
    yield "floats, FP8, 4 bits" if name in quantised else "floats; others by its parts"
    yield _on_gpu(name, kind, config)
    yield _groups(config)


def _on_gpu(name: str, kind: str, config: ModelConfig) -> str:
    if why := obstacle(config):
        return f"PyTorch's operations: {why} has no kernels"
    if kind in MEASURED:
        return "fused; has figures"
    if name in FUSED.keys() | LATENTS.keys() and name not in UNSEEN:
        return "fused; compared on a GPU"
    return "fused; compared in the interpreter" if name in FUSED or name in PLAIN else "fused"


def _groups(config: ModelConfig) -> str:
    split = split_layers(lives_of(config))
    names = [type(kind).__name__.lower() for kind, layers in split if layers]
    lent = sum(getattr(own, "kv_from", None) is not None for own in config.mixers)
    return " + ".join(names) + (", some share" if lent else "")


def checkpoints_table() -> str:
    """A row for each config in published form."""
    rows = []
    for each in json.loads(PUBLISHED.read_text(encoding="utf-8")):
        found = each.get("read") or f"refused: `{each['refused']}`"
        rows.append((f"`{each['name']}`", str(each["year"]), found))
    return table(("checkpoint", "year", "what is read"), *rows)


def recipes_list() -> str:
    """The recipes of others for models of this year, and how many run here."""
    stated = json.loads(RECIPES.read_text(encoding="utf-8"))
    known = {family.architecture for family in FAMILIES.values()}
    runs = sorted(name for name, kind in stated["recipes"].items() if kind in known)
    others = sorted(stated["recipes"].keys() - set(runs))
    return (
        f"Of {len(stated['recipes'])} recipes for text or images that {stated['source']} got in"
        f" 2026, the text part of **{len(runs)}** is read here, by class:\n{', '.join(runs)}.\n\n"
        f"Not read ({len(others)}): {', '.join(others)}."
    )
