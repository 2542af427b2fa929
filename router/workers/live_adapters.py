"""Adapters that operators load and unload while workers run.

A command comes to the router's admin port, and goes to all workers of a model that take adapters.
It is done when all have done it with equal contents. Where one cannot load, those that have loaded
let it go again, so that no name leads to a half. What was loaded or unloaded here is so for workers
that attach later, too, until another router changes it: what all workers report is followed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from baton.worker.v1 import worker_pb2
from router.workers.link import LinkState

if TYPE_CHECKING:
    from starlette.requests import Request

    from router.workers.link import WorkerLink

logger = logging.getLogger(__name__)

ANSWER_S: Final = 120.0
"""Longest wait for all workers that read an adapter, seconds. Not tuned."""
_LOOK_S: Final = 0.5
"""Time between two looks whether a worker that is asked is still there. Not tuned."""
MOST_GONE: Final = 256
"""Most names that were unloaded here and are remembered. The oldest go. Not tuned."""
_MOST_CALLS: Final = 4096
"""Most calls whose answers are awaited or may come late. The oldest go. Not tuned."""
_LOAD_FORM: Final = '{"lora_name": NAME, "lora_path": FOLDER, "load_inplace": false}'
_UNLOAD_FORM: Final = '{"lora_name": NAME}'


class AdapterRefusedError(Exception):
    """A command about an adapter was not done. The message says why, for operators."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status
        """Status of the HTTP answer."""


class _Wanted(NamedTuple):
    """An adapter that was loaded here."""

    model: str
    path: str
    digest: bytes


class _Order(NamedTuple):
    """What a worker is asked to do."""

    name: str
    path: str = ""
    """Where to load it from; empty: it is unloaded."""
    again: bool = False
    digest: bytes = b""
    """What a load must bring; empty: not known before."""

    def message(self, call_id: bytes) -> worker_pb2.WorkRequest:
        if not self.path:
            unload = worker_pb2.UnloadAdapter(call_id=call_id, name=self.name)
            return worker_pb2.WorkRequest(unload_adapter=unload)
        load = worker_pb2.LoadAdapter(
            call_id=call_id, name=self.name, path=self.path, again=self.again
        )
        return worker_pb2.WorkRequest(load_adapter=load)


@dataclass(slots=True)
class _Call:
    """An order that a worker has."""

    order: _Order
    answer: asyncio.Future[worker_pb2.AdapterDone] | None
    """Where a command waits for it; None: nobody waits, or no more."""


class LiveAdapters:
    """See the module. Belongs to the event loop.

    Args:
        members: the attached workers.
        taken: names that no adapter can have.
    """

    def __init__(
        self, members: Callable[[], Sequence[WorkerLink]], taken: Collection[str] = ()
    ) -> None:
        self._members = members
        self._taken = taken
        self._calls: dict[bytes, _Call] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._gone: dict[str, None] = {}
        """Names that were unloaded here."""
        self._had: WeakKeyDictionary[WorkerLink, Mapping[str, bytes]] = WeakKeyDictionary()
        """What each worker reported last."""
        self._turns = asyncio.Lock()
        self._busy = ""
        """The name that a command is about now."""

    async def load(self, name: str, path: str, model: str = "", *, again: bool = False) -> bytes:
        """Loads one on all workers of a model.

        Args:
            name: by which requests choose it.
            path: its folder, below the workers' `adapters_dir`.
            model: whose; empty: of the only one that takes adapters.
            again: the name may have another content already, of which this takes the place.

        Returns:
            The digest of its content.

        Raises:
            AdapterRefusedError: not all workers have it.
        """
        async with self._turns:
            links = self._taking(model)
            base = links[0].identity.model.name
            self._check_name(name, base)
            had = {link for link in links if name in link.adapters}
            with self._about(name, set(links) - had):
                done = await self._ask(links, _Order(name, path, again))
                digests = {answer.digest for answer in done.values() if not answer.error}
                errors = _errors(done)
                if errors or len(digests) != 1:
                    differ = "the workers read different contents from that folder"
                    loaded = [one for one, answer in done.items() if not answer.error]
                    undone = await self._undo(name, loaded, had)
                    raise AdapterRefusedError((errors or differ) + undone)
                digest = digests.pop()
                self._wanted[name] = _Wanted(base, path, digest)
                self._gone.pop(name, None)
            logger.info("adapter loaded", extra={"adapter": name, "digest": digest.hex()[:16]})
            return digest

    def _check_name(self, name: str, model: str) -> None:
        """Refuses a name that means something else already."""
        if name in self._taken:
            raise AdapterRefusedError(f"{name!r} is one of --split-names")
        if any(name == link.identity.model.name for link in self._members()):
            raise AdapterRefusedError(f"{name!r} is the name of a model")
        others = {one.identity.model.name for one in self._members() if name in one.adapters}
        if (wanted := self._wanted.get(name)) is not None:
            others.add(wanted.model)
        if others := others - {model}:
            raise AdapterRefusedError(f"{name!r} is an adapter of {min(others)}: unload that first")

    async def _undo(self, name: str, loaded: Sequence[WorkerLink], had: set[WorkerLink]) -> str:
        """Some workers have loaded what others could not: they let it go, or get back what they
        had. Returns what to say where that is not known here."""
        new, changed = set(loaded) - had, [one for one in loaded if one in had]
        back = self._ask(new, _Order(name))
        if changed and (before := self._wanted.get(name)) is not None:
            again = _Order(name, before.path, True, before.digest)
            _, done = await asyncio.gather(back, self._ask(changed, again))
            changed = [one for one, answer in done.items() if answer.digest != before.digest]
        else:
            await back
        names = ", ".join(one.worker_id for one in changed)
        return f"; {names} have the new content: load again, or unload" if changed else ""

    async def unload(self, name: str) -> None:
        """Forgets a name on all workers that have it.

        Raises:
            AdapterRefusedError: nobody has it, or a worker did not answer.
        """
        async with self._turns:
            self._wanted.pop(name, None)
            self._forget(name)
            having = [link for link in self._members() if name in link.adapters]
            if not having:
                raise AdapterRefusedError(f"The lora adapter {name!r} cannot be found.", 404)
            with self._about(name):
                done = await self._ask(having, _Order(name))
            if errors := _errors(done):
                raise AdapterRefusedError(errors)
            logger.info("adapter unloaded", extra={"adapter": name})

    def _forget(self, name: str) -> None:
        self._gone.pop(name, None)
        self._gone[name] = None
        if len(self._gone) > MOST_GONE:
            del self._gone[next(iter(self._gone))]

    def attached(self, link: WorkerLink) -> None:
        """A worker came: it gets what was loaded here for its model, and loses what was unloaded
        here while it was away."""
        self._had[link] = link.adapters
        for name in [*self._wanted, *self._gone]:
            self._bring(link, name)

    def changed(self, link: WorkerLink) -> None:
        """A worker reports other adapters. What all have changed was changed by another router."""
        before, now = self._had.get(link, {}), link.adapters
        self._had[link] = now
        asked = {self._busy, *(call.order.name for call in self._calls.values() if call.order.path)}
        for name in now.keys() - before.keys() - asked:
            self._gone.pop(name, None)
        for name in before.keys() & self._wanted.keys() - {self._busy}:
            wanted = self._wanted[name]
            if wanted.digest == before[name] != now.get(name) and not self._has_any(name, wanted):
                del self._wanted[name]
                logger.info("adapter changed through another router", extra={"adapter": name})

    def _has_any(self, name: str, wanted: _Wanted) -> bool:
        """Whether any worker still has what was loaded here."""
        members = [one for one in self._members() if one.identity.model.name == wanted.model]
        return any(one.adapters.get(name) == wanted.digest for one in members)

    @contextmanager
    def _about(self, name: str, new: Collection[WorkerLink] = ()) -> Iterator[None]:
        """Meanwhile a command is about a name. `new` are workers that had nothing of that name."""
        self._busy = name
        try:
            yield
        finally:
            self._busy = ""
            self._even_out(name, new)

    def _even_out(self, name: str, new: Collection[WorkerLink]) -> None:
        """After a command: workers that came meanwhile, or whose answer came too late, get what the
        others have."""
        for link in self._members():
            if name in self._wanted or name in self._gone:
                self._bring(link, name)
            elif link in new and name in link.adapters:
                self._send(link, _Order(name))

    def _bring(self, link: WorkerLink, name: str) -> None:
        """Sends a worker what makes it have what is wanted, if it has anything else."""
        has, wanted = link.adapters.get(name), self._wanted.get(name)
        if not link.takes_adapters or name == self._busy:
            return  # The end of the command looks after it.
        if wanted is None:
            if has is not None and name in self._gone:
                self._send(link, _Order(name))
        elif wanted.model == link.identity.model.name and has != wanted.digest:
            self._send(link, _Order(name, wanted.path, True, wanted.digest))

    def answered(self, link: WorkerLink, done: worker_pb2.AdapterDone) -> None:
        """A worker has done what it was asked, or says why not."""
        call = self._calls.pop(done.call_id, None)
        if call is not None and call.answer is not None and not call.answer.done():
            call.answer.set_result(done)
        elif done.error:
            logger.warning("%s has not done as asked: %s", link.worker_id, done.error)
        elif call is not None and call.order.path and call.order.name != self._busy:
            self._loaded_late(link, call.order, done.digest)

    def _loaded_late(self, link: WorkerLink, order: _Order, digest: bytes) -> None:
        """A worker has loaded what no command waits for."""
        wanted = self._wanted.get(order.name)
        if wanted is not None and digest == wanted.digest:
            return
        if wanted is not None and digest != order.digest != wanted.digest:
            self._bring(link, order.name)  # It was asked for other content, by an earlier command.
            return
        why = "another content than was loaded here" if wanted else "what is wanted no more"
        logger.warning("%s has loaded %s as %s: unloaded", link.worker_id, why, order.name)
        self._send(link, _Order(order.name))

    def routes(self) -> list[Route]:
        """`/adapters` lists them. The commands have vLLM's paths and words."""
        return [
            Route("/adapters", self._list),
            Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
        ]

    def _taking(self, model: str) -> list[WorkerLink]:
        """The workers of a model, all of which take adapters."""
        taking = [one for one in self._members() if one.takes_adapters]
        names = {one.identity.model.name for one in taking}
        if model:
            names &= {model}
        if len(names) != 1:
            known = ", ".join(sorted(names)) or "none"
            raise AdapterRefusedError(f"name one model that takes adapters: {known}")
        model = names.pop()
        without = [
            one.worker_id
            for one in self._members()
            if one.identity.model.name == model and not one.takes_adapters
        ]
        if without:
            logger.warning("workers of %s take no adapters: %s", model, ", ".join(without))
        return [one for one in taking if one.identity.model.name == model]

    def _send(
        self,
        link: WorkerLink,
        order: _Order,
        answer: asyncio.Future[worker_pb2.AdapterDone] | None = None,
    ) -> bytes:
        """Asks a worker; returns the id of the call."""
        call_id = secrets.token_bytes(16)
        self._calls[call_id] = _Call(order, answer)
        if len(self._calls) > _MOST_CALLS:
            del self._calls[next(iter(self._calls))]
        link.send(order.message(call_id))
        return call_id

    async def _ask(
        self, links: Iterable[WorkerLink], order: _Order
    ) -> dict[WorkerLink, worker_pb2.AdapterDone]:
        """What each of some workers answers. One that leaves, or answers too late, has an error.
        All have the same time."""
        loop = asyncio.get_running_loop()
        ends_s, asked = loop.time() + ANSWER_S, {}
        for link in links:
            answer: asyncio.Future[worker_pb2.AdapterDone] = loop.create_future()
            asked[link] = self._send(link, order, answer), answer
        return {link: await self._answer(link, *waits, ends_s) for link, waits in asked.items()}

    async def _answer(
        self,
        link: WorkerLink,
        call_id: bytes,
        answer: asyncio.Future[worker_pb2.AdapterDone],
        ends_s: float,
    ) -> worker_pb2.AdapterDone:
        loop = asyncio.get_running_loop()
        while not answer.done() and link.state is LinkState.ATTACHED:
            if (left_s := ends_s - loop.time()) <= 0:
                break
            await asyncio.wait([answer], timeout=min(left_s, _LOOK_S))
        if answer.done():
            return answer.result()
        if link.state is not LinkState.ATTACHED:
            self._calls.pop(call_id, None)
        elif (call := self._calls.get(call_id)) is not None:
            call.answer = None  # It may come late.
        return worker_pb2.AdapterDone(call_id=call_id, error="it does not answer")

    async def _list(self, _request: Request) -> Response:
        found: dict[str, dict[str, Any]] = {}
        for link in self._members():
            for name, digest in link.adapters.items():
                one = found.setdefault(name, {"name": name, "model": link.model[0], "workers": {}})
                one["workers"][link.worker_id] = digest.hex()
        return JSONResponse({"adapters": sorted(found.values(), key=lambda one: str(one["name"]))})

    async def _load(self, request: Request) -> Response:
        body = await _body(request)
        name, path = body.get("lora_name"), body.get("lora_path")
        again, model = body.get("load_inplace", False), body.get("base_model_name", "")
        strings = isinstance(name, str) and isinstance(path, str) and isinstance(model, str)
        if not strings or not name or not path or not isinstance(again, bool):
            return JSONResponse({"error": f"the body must be {_LOAD_FORM}"}, 400)
        try:
            await self.load(name, path, model, again=again)
        except AdapterRefusedError as error:
            return JSONResponse({"error": str(error)}, error.status)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: Request) -> Response:
        name = (await _body(request)).get("lora_name")
        if not isinstance(name, str) or not name:
            return JSONResponse({"error": f"the body must be {_UNLOAD_FORM}"}, 400)
        try:
            await self.unload(name)
        except AdapterRefusedError as error:
            return JSONResponse({"error": str(error)}, error.status)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _errors(done: Mapping[WorkerLink, worker_pb2.AdapterDone]) -> str:
    """What workers say why not, with their names; empty: all have done it."""
    return "; ".join(f"{one.worker_id}: {each.error}" for one, each in done.items() if each.error)


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
