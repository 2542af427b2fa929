"""`baton.LLM`, which is imported on first use: it needs PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.installing import install_line

if TYPE_CHECKING:
    from local.llm import LLM


def llm() -> type[LLM]:
    """The class.

    Raises:
        ModuleNotFoundError: what it needs is not installed; a note says how to install it.
    """
    try:
        from local.llm import LLM
    except ModuleNotFoundError as error:
        error.add_note(f"LLM needs what servers need: {install_line('worker', 'router')}")
        raise
    return LLM
