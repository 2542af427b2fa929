"""How ranks share a class, by transformers' own plan.

A plan names modules, and how each is divided: `colwise`, a rank has some outputs; `rowwise`, it has
some inputs, and the ranks add up. That is what our products do, so no code of transformers runs
between ranks. A class whose plan has something else, or that has none, runs on one rank.
"""

from __future__ import annotations

import re
from typing import Any, Final

from engine.model.config import UnsupportedModelError
from engine.model.wrapped.classes import refusal
from engine.model.wrapped.recording import Record, record

OUTPUTS: Final = "colwise"
INPUTS: Final = "rowwise"
_WHOLE: Final = ("replicated_with_grad_allreduce", "replicate", "embedding_rowwise")
"""Styles of weights that every rank has here: those of norms, and the embedding."""


def plan_of(name: str, causal: Any, found: Record, count: int) -> dict[str, str]:
    """The plan of a class for so many ranks: styles by patterns of names.

    Raises:
        UnsupportedModelError: so many ranks cannot share it; it says why.
    """
    if count == 1:
        return {}
    plan = {
        module: style
        for module, style in (causal.tp_plan or {}).items()
        if module.startswith(f"{found.body}.")
    }
    if not plan:
        raise refusal(name, f"tp {count}: transformers has no plan for it; tp 1 fits")
    if others := sorted(set(plan.values()) - {OUTPUTS, INPUTS, *_WHOLE}):
        those = ", ".join(others)
        raise refusal(name, f"tp {count}: transformers' plan has {those}; tp 1 fits")
    for heads in {each for call in found.calls for each in (call.heads, call.kv_heads)}:
        if heads % count:
            raise refusal(name, f"tp {count}: it does not divide {heads} heads")
    return plan


def style_of(plan: dict[str, str], module: str) -> str:
    """How a module is divided; empty: every rank has all of it."""
    return plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", module), "")


def check_part(name: str, part: Any, found: Record, count: int) -> None:
    """Runs a rank's part of a class without numbers: its code must take what heads there are.

    Raises:
        UnsupportedModelError: it does not.
    """
    why = f"tp {count}: its code does not take a part of the heads; tp 1 fits"
    try:
        own = record(name, part)
    except UnsupportedModelError as error:
        raise refusal(name, why) from error
    for one, whole in zip(own.calls, found.calls, strict=True):
        if (one.heads * count, one.kv_heads * count) != (whole.heads, whole.kv_heads):
            raise refusal(name, why)
