"""Clients of a router over gRPC, blocking and asyncio."""

from baton.client.clients import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]
