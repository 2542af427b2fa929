"""The adapters of a worker, as routers hear of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from engine.adapters.registry import Adapters


def adapters_message(adapters: Adapters) -> worker_pb2.WorkResponse | None:
    """Tells a router which adapters requests may name; None: the worker takes none."""
    if not adapters.on:
        return None
    named = [worker_pb2.Adapter(name=info.name, digest=info.digest) for info in adapters.named()]
    return worker_pb2.WorkResponse(adapters=worker_pb2.Adapters(adapters=named))
