"""Baton: disaggregated LLM serving. The public face: stubs, clients, settings, command line.

Two distributions hold this package: `baton-llm` has all of it, `baton-client` what clients need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.client import AsyncClient as AsyncClient
    from baton.client import Client as Client
    from baton.local.llm import LLM as LLM

__version__ = "0.1.0"

_CLIENTS = ("AsyncClient", "Client")


def __getattr__(name: str) -> Any:
    """Imports a name on first use: clients need gRPC, and `LLM` needs PyTorch.

    Raises:
        ImportError: what the name needs is not installed; the error or its note says what to
            install.
        AttributeError: there is no such name.
    """
    if name == "LLM":
        return _llm()
    if name not in _CLIENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from baton import client

    return getattr(client, name)


def _llm() -> Any:
    try:
        from baton.local.llm import LLM
    except ModuleNotFoundError as error:
        if error.name in ("baton.local", "baton.local.llm"):
            problem = "baton-client has no LLM: pip uninstall baton-client, then install baton-llm"
            raise ImportError(problem, name=error.name) from None
        from baton.installing import install_line

        error.add_note(f"LLM needs what servers need: {install_line('worker', 'router')}")
        raise
    return LLM
