"""A model in the caller's process, without servers: a worker's engine behind a router's doors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving.installing import install_line

if TYPE_CHECKING:
    from local.llm import LLM as LLM


def __getattr__(name: str) -> Any:
    """Imports `LLM` on first use: it needs PyTorch.

    Raises:
        ModuleNotFoundError: what it needs is not installed; a note says how to install it.
        AttributeError: there is no such name.
    """
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from local.llm import LLM
    except ModuleNotFoundError as error:
        error.add_note(f"LLM needs what servers need: {install_line('worker', 'router')}")
        raise
    return LLM
