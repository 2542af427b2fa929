"""Adapters that operators load and unload while workers run.

A command comes to the router's admin port, and goes to all workers of a model that take adapters.
It is done when all have done it with equal contents. Where one cannot load, those that have loaded
let it go again, so that no name leads to a half. What was loaded here is loaded by workers that
attach later, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from baton.worker.v1 import worker_pb2
from router.workers.link import LinkState

if TYPE_CHECKING:
    from starlette.requests import Request

    from router.workers.link import WorkerLink

logger = logging.getLogger(__name__)

ANSWER_S: Final = 120.0
"""Longest wait for a worker that reads an adapter, seconds."""
_LOOK_S: Final = 0.5
"""Time between two looks whether a worker that is asked is still there. Not tuned."""
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


class LiveAdapters:
    """See the module. Belongs to the event loop.

    Args:
        members: the attached workers.
    """

    def __init__(self, members: Callable[[], Sequence[WorkerLink]]) -> None:
        self._members = members
        self._answers: dict[bytes, asyncio.Future[worker_pb2.AdapterDone]] = {}
        self._wanted: dict[str, _Wanted] = {}
        self._turns = asyncio.Lock()

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
            if any(name == link.identity.model.name for link in self._members()):
                raise AdapterRefusedError(f"{name!r} is the name of a model")
            had = {link for link in links if name in link.adapters}
            done = await self._ask(links, _load(name, path, again=again))
            digests = {answer.digest for answer in done.values() if not answer.error}
            errors = _errors(done)
            if errors or len(digests) != 1:
                differ = "the workers read different contents from that folder"
                loaded = [one for one, answer in done.items() if not answer.error]
                raise AdapterRefusedError((errors or differ) + await self._undo(name, loaded, had))
            digest = digests.pop()
            self._wanted[name] = _Wanted(base, path, digest)
            logger.info("adapter loaded", extra={"adapter": name, "digest": digest.hex()[:16]})
            return digest

    async def _undo(self, name: str, loaded: Sequence[WorkerLink], had: set[WorkerLink]) -> str:
        """Some workers have loaded what others could not: they let it go, or get back what they
        had. Returns what to say where that is not known here."""
        await self._ask([one for one in loaded if one not in had], _unload(name))
        changed = [one for one in loaded if one in had]
        if not changed:
            return ""
        if (before := self._wanted.get(name)) is not None:
            done = await self._ask(changed, _load(name, before.path, again=True))
            changed = [one for one, answer in done.items() if answer.digest != before.digest]
        names = ", ".join(one.worker_id for one in changed)
        return f"; {names} have the new content: load again, or unload" if changed else ""

    async def unload(self, name: str) -> None:
        """Forgets a name on all workers that have it.

        Raises:
            AdapterRefusedError: nobody has it, or a worker did not answer.
        """
        async with self._turns:
            self._wanted.pop(name, None)
            having = [link for link in self._members() if name in link.adapters]
            if not having:
                raise AdapterRefusedError(f"The lora adapter {name!r} cannot be found.", 404)
            done = await self._ask(having, _unload(name))
            if errors := _errors(done):
                raise AdapterRefusedError(errors)
            logger.info("adapter unloaded", extra={"adapter": name})

    def attached(self, link: WorkerLink) -> None:
        """A worker came: it loads what was loaded here for its model."""
        for name, wanted in self._wanted.items():
            if wanted.model == link.identity.model.name and name not in link.adapters:
                link.send(_load(name, wanted.path, again=False)(secrets.token_bytes(16)))

    def answered(self, link: WorkerLink, done: worker_pb2.AdapterDone) -> None:
        """A worker has done what it was asked, or says why not."""
        if (answer := self._answers.pop(done.call_id, None)) is not None and not answer.done():
            answer.set_result(done)
        elif done.error:
            logger.warning("%s has not loaded an adapter: %s", link.worker_id, done.error)

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

    async def _ask(
        self,
        links: Iterable[WorkerLink],
        make: Callable[[bytes], worker_pb2.WorkRequest],
    ) -> dict[WorkerLink, worker_pb2.AdapterDone]:
        """What each of some workers answers. One that leaves, or answers too late, has an error."""
        asked = {}
        for link in links:
            call_id = secrets.token_bytes(16)
            self._answers[call_id] = asyncio.get_running_loop().create_future()
            asked[link] = call_id, self._answers[call_id]
            link.send(make(call_id))
        return {link: await self._answer(link, *waits) for link, waits in asked.items()}

    async def _answer(
        self, link: WorkerLink, call_id: bytes, answer: asyncio.Future[worker_pb2.AdapterDone]
    ) -> worker_pb2.AdapterDone:
        ends_s = asyncio.get_running_loop().time() + ANSWER_S
        while not answer.done() and link.state is LinkState.ATTACHED:
            if asyncio.get_running_loop().time() > ends_s:
                break
            await asyncio.wait([answer], timeout=_LOOK_S)
        self._answers.pop(call_id, None)
        if answer.done():
            return answer.result()
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


def _load(name: str, path: str, *, again: bool) -> Callable[[bytes], worker_pb2.WorkRequest]:
    def make(call_id: bytes) -> worker_pb2.WorkRequest:
        asked = worker_pb2.LoadAdapter(call_id=call_id, name=name, path=path, again=again)
        return worker_pb2.WorkRequest(load_adapter=asked)

    return make


def _unload(name: str) -> Callable[[bytes], worker_pb2.WorkRequest]:
    def make(call_id: bytes) -> worker_pb2.WorkRequest:
        asked = worker_pb2.UnloadAdapter(call_id=call_id, name=name)
        return worker_pb2.WorkRequest(unload_adapter=asked)

    return make
