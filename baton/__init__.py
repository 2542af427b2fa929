"""Baton: disaggregated LLM serving. The public face: stubs, clients, settings, command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.local.llm import LLM as LLM

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports `LLM` on first use: it needs PyTorch, which clients and routers do not."""
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from baton.local.llm import LLM
    except ModuleNotFoundError as error:
        error.add_note("LLM needs what servers need: pip install 'baton-llm[worker,router]'")
        raise
    return LLM
