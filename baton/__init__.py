"""Baton: disaggregated LLM serving. The public face: stubs, clients, errors, addresses, TLS.

Two distributions hold this package: `baton-client` has it alone, `baton-llm` the servers, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.version import __version__ as __version__

if TYPE_CHECKING:
    from baton.client import AsyncClient as AsyncClient
    from baton.client import Client as Client
    from local.llm import LLM as LLM

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
        # A module and not `local` itself: a folder of that name may lie on the path, too.
        from local.offer import llm
    except ImportError as error:
        if error.name in ("local", "local.offer"):
            problem = "baton-client has no LLM: pip uninstall baton-client, then install baton-llm"
            raise ImportError(problem, name=error.name) from None
        raise
    return llm()
