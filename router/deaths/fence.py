"""`/fence`: an operator's word that nothing of a lost worker runs any more."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.deaths.witness import NotLostError

if TYPE_CHECKING:
    from starlette.requests import Request

    from router.deaths.witness import Deaths
    from router.workers.link import WorkerLink


def fence_route(deaths: Deaths, members: Callable[[], Sequence[WorkerLink]]) -> Route:
    """GET lists the lost workers whose end nobody has seen; POST with a worker and its epoch says
    that it is gone. What is not in the list is refused: a wrong epoch frees no page.

    Args:
        deaths: of the router.
        members: the attached workers, which cannot be fenced.
    """

    async def page(request: Request) -> Response:
        if request.method != "POST":
            return JSONResponse({"lost": deaths.unproven})
        try:
            asked = json.loads(await request.body())
            worker, epoch = asked["worker"], int(asked["epoch"], 16)
            if not isinstance(worker, str) or not 0 < epoch < 1 << 64:
                raise ValueError("no worker, or no epoch")
        except (ValueError, KeyError, TypeError, RecursionError):
            form = '{"worker": NAME, "epoch": 16 hexadecimal digits}'
            return JSONResponse({"error": f"the body must be {form}"}, 400)
        attached = {(one.identity.worker_id, one.identity.epoch) for one in members()}
        if (worker, epoch) in attached:
            why = f"{worker} of epoch {epoch:016x} is attached: it lives, and may write pages"
            return JSONResponse({"error": why}, 409)
        try:
            deaths.fence(worker, epoch)
        except NotLostError:
            start = f"{worker} of epoch {epoch:016x}"
            why = f"this router knows no lost {start}: `baton fence` lists those that it knows"
            return JSONResponse({"error": why}, 404)
        return JSONResponse({"worker": worker, "epoch": f"{epoch:016x}"})

    return Route("/fence", page, methods=["GET", "POST"])
