"""HTTP service discovery at the router's admin port, for Prometheus to find the workers.

It lists attached workers only. A worker that is gone leaves with its stream, and `baton_worker_up`
shows that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from telemetry.names import FAILURE_UNIT, FINGERPRINT

if TYPE_CHECKING:
    from starlette.requests import Request

    from router.workers.link import WorkerLink


def discovery_route(members: Callable[[], Iterable[WorkerLink]]) -> Route:
    """`/discovery`: a target for each attached worker that announced an admin address."""

    async def page(request: Request) -> Response:
        return JSONResponse([_target(link) for link in members() if link.identity.admin_address])

    return Route("/discovery", page)


def _target(link: WorkerLink) -> dict[str, object]:
    model = link.identity.model
    labels = {"worker": link.worker_id, "role": link.role, "model": model.name}
    own = {FINGERPRINT: model.fingerprint, FAILURE_UNIT: link.identity.failure_unit}
    return {"targets": [link.identity.admin_address], "labels": labels | own}
