"""Changes of roles: who may ask for one, what is refused, and how a worker is told.

An operator asks at the router's admin port (`POST /roles`), the balance by itself. The router
passes it on over the worker's stream, and the worker's reports say when it has the new role
(`worker_base.roles`). Until they do, what was asked counts, so that changes in quick succession
leave somebody of each role. Any router that the worker is attached to may be asked. Two that are
asked at once know nothing of each other: their reports show it, and both send their worker back.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
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
_LEGS: Final = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)
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
        if role in (_heading(link), 0):
            return link
        if why := obstacle(link, role, members):
            raise RoleRefusedError(f"{worker_id} stays {link.role}: {why}")
        _ask(link, role, link.identity.role)
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
    queued: Callable[[], Mapping[str, int]],
) -> None:
    """Changes roles by how busy the workers are, until cancelled.

    Args:
        balance: decides.
        roles: changes them.
        members: the attached workers.
        queued: what waits in this router, by the name of the model.
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
    others = [one for one in members if one is not link]
    model = link.identity.model.name
    loses_prompts = link.prefills and role == worker_pb2.WORKER_ROLE_DECODE
    if loses_prompts and not _some_keep(worker_pb2.WORKER_ROLE_PREFILL, link, others):
        return f"no other worker computes prompts of {model}"
    loses_tokens = link.decodes and role == worker_pb2.WORKER_ROLE_PREFILL
    if loses_tokens and not _some_keep(worker_pb2.WORKER_ROLE_DECODE, link, others):
        return f"no other worker decodes for {model}"
    return ""


def keep_roles(members: Sequence[WorkerLink]) -> None:
    """Sends workers back that this router has just asked to leave a role, if nobody is left there.
    Then another router asked others at the same time. Called after reports of other roles."""
    for link in members:
        former = link.asked.former
        legs = (leg for leg in _LEGS if former in (leg, worker_pb2.WORKER_ROLE_BOTH))
        if former and not all(_some_keep(leg, link, members) for leg in legs):
            details = {"worker": link.worker_id, "to": name_of(former)}
            logger.warning("a role is sent back: nobody else would be left", extra=details)
            _ask(link, former)


def _some_keep(
    leg: worker_pb2.WorkerRole.ValueType, link: WorkerLink, members: Sequence[WorkerLink]
) -> bool:
    """Whether one of them computes prompts, or decodes, of a worker's model, and will go on to."""
    roles = (leg, worker_pb2.WORKER_ROLE_BOTH)
    return any(
        one.identity.role in roles and _heading(one) in roles and not one.estimate.draining
        for one in members
        if one.model == link.model and one.fingerprint == link.fingerprint
    )


def _heading(link: WorkerLink) -> worker_pb2.WorkerRole.ValueType:
    """The role that a worker will have, by what it was asked and what it reports."""
    return link.asked.role or link.next_role or link.identity.role


def _ask(
    link: WorkerLink,
    role: worker_pb2.WorkerRole.ValueType,
    former: worker_pb2.WorkerRole.ValueType = worker_pb2.WORKER_ROLE_UNSPECIFIED,
) -> None:
    link.asked.ask(role, former)
    link.send(worker_pb2.WorkRequest(set_role=worker_pb2.SetRole(role=role)))


def _described(link: WorkerLink) -> dict[str, object]:
    heading = _heading(link)
    return {
        "worker": link.worker_id,
        "model": link.identity.model.name,
        "role": link.role,
        "next_role": name_of(heading) if heading != link.identity.role else None,
        "flexible": link.flexible,
    }
