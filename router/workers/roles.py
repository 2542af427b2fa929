"""Changes of roles: who may ask for one, what is refused, and how a worker is told.

An operator asks at the router's admin port (`POST /roles`), the balance by itself. The router
passes it on over the worker's stream, and the worker's reports say when it has the new role
(`worker_base.roles`). Any router that the worker is attached to may be asked.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton.worker.v1 import worker_pb2
from router.events import NO_EVENTS, RouterEvents
from router.workers.balance import LOOK_S
from router.workers.link import name_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from router.workers.balance import Balance
    from router.workers.link import WorkerLink

logger = logging.getLogger(__name__)

OPERATOR: Final = "operator"
"""The cause of changes that are asked for at the admin port."""
BALANCE: Final = "balance"
_ROLES: Final = {name_of(role): role for role in worker_pb2.WorkerRole.values() if role}


class RoleRefusedError(Exception):
    """A worker cannot have the role. The message says why, for operators."""

    def __init__(self, why: str, status: int = 409) -> None:
        super().__init__(why)
        self.status = status
        """Status of the HTTP answer."""


class Roles:
    """Changes the roles of attached workers.

    Args:
        members: the attached workers.
        events: counts changes.
        said: what the balance says of itself; "" without one.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[WorkerLink]],
        events: RouterEvents = NO_EVENTS,
        said: Callable[[], str] = str,
    ) -> None:
        self._members = members
        self._events = events
        self._said = said

    def change(
        self, worker_id: str, role: worker_pb2.WorkerRole.ValueType, cause: str
    ) -> WorkerLink:
        """Tells a worker to change. What it has, or is told already, is not told again.

        Raises:
            RoleRefusedError: it is unknown, or cannot have the role.
        """
        members = self._members()
        link = next((one for one in members if one.worker_id == worker_id), None)
        if link is None:
            known = ", ".join(sorted(one.worker_id for one in members)) or "none"
            raise RoleRefusedError(f"no worker {worker_id!r} is attached; attached: {known}", 404)
        if role in (link.next_role or link.identity.role, 0):
            return link
        if why := obstacle(link, role, members):
            raise RoleRefusedError(f"{worker_id} stays {link.role}: {why}")
        link.send(worker_pb2.WorkRequest(set_role=worker_pb2.SetRole(role=role)))
        self._events.role_asked(name_of(role), cause)
        return link

    def route(self) -> Route:
        """`/roles`: GET lists the workers' roles, POST with a worker and a role changes one."""
        return Route("/roles", self._page, methods=["GET", "POST"])

    async def _page(self, request: Request) -> Response:
        if request.method != "POST":
            workers = [_described(link) for link in self._members()]
            return JSONResponse({"workers": workers, "balance": self._said()})
        try:
            asked = json.loads(await request.body())
            worker, role = asked["worker"], _ROLES[asked["role"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            form = '{"worker": NAME, "role": "prefill" | "decode" | "both"}'
            return JSONResponse({"error": f"the body must be {form}"}, 400)
        try:
            link = self.change(worker, role, OPERATOR)
        except RoleRefusedError as error:
            return JSONResponse({"error": str(error)}, error.status)
        return JSONResponse(_described(link))


async def balance_forever(
    balance: Balance,
    roles: Roles,
    members: Callable[[], Sequence[WorkerLink]],
    queued: Callable[[], int],
) -> None:
    """Changes roles by how busy the workers are, until cancelled.

    Args:
        balance: decides.
        roles: changes them.
        members: the attached workers.
        queued: requests that wait in this router.
    """
    clock = asyncio.get_running_loop().time
    refused = ""
    while True:
        await asyncio.sleep(LOOK_S)
        for worker_id, role, why in balance.look(clock(), members(), queued()):
            try:
                roles.change(worker_id, role, BALANCE)
            except RoleRefusedError as error:
                if str(error) != refused:
                    refused = str(error)
                    logger.info("the balance cannot change a role", extra={"cause": refused})
            else:
                details = {"worker": worker_id, "to": name_of(role), "cause": why}
                logger.info("the balance changes a role", extra=details)


def obstacle(
    link: WorkerLink, role: worker_pb2.WorkerRole.ValueType, members: Sequence[WorkerLink]
) -> str:
    """Why a worker cannot have a role; "" if it can."""
    if not link.flexible:
        return "it was started without --flexible"
    if link.estimate.draining:
        return "it is draining"
    if link.only_pools and role == worker_pb2.WORKER_ROLE_DECODE:
        return "its model only pools prompts"
    others = [
        one
        for one in members
        if one is not link
        and one.model == link.model
        and one.fingerprint == link.fingerprint
        and not one.draining
    ]
    model = link.identity.model.name
    loses_prompts = link.prefills and role == worker_pb2.WORKER_ROLE_DECODE
    if loses_prompts and not any(one.prefills for one in others):
        return f"no other worker computes prompts of {model}"
    loses_tokens = link.decodes and role == worker_pb2.WORKER_ROLE_PREFILL
    if loses_tokens and not any(one.decodes for one in others):
        return f"no other worker decodes for {model}"
    return ""


def _described(link: WorkerLink) -> dict[str, object]:
    return {
        "worker": link.worker_id,
        "model": link.identity.model.name,
        "role": link.role,
        "next_role": name_of(link.next_role) if link.next_role else None,
        "flexible": link.flexible,
    }
