"""Renders conversations, and reads tokenizers for the first time, in processes aside.

A chat template is a program that came with a checkpoint: it may loop for ever or fill memory, and
one that is harmless may be slow for some turns. A `tokenizer.json` may abort the process that reads
it. So both are done in forked processes first (`router.aside`), with bounds on CPU time and memory.

A process for a model's templates answers one conversation after the other. It is ended if one was
too much for it.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from baton.inference.v1 import inference_pb2 as api
from router.aside.forks import Forked, ForkServer, WorkEndedError, WorkLateError
from router.aside.turns import Turns
from router.aside.wire import Bounds
from router.folders.templates import Templates
from router.folders.tokenizer import read_tokenizer
from router.requests.chat_template import ChatTemplateError, render

BOUNDS: Final = Bounds(cpu_s=4.0, memory_bytes=256 << 20, time_s=60.0)
"""Bounds of rendering one conversation."""
READ: Final = Bounds(cpu_s=60.0, memory_bytes=4 << 30, time_s=240.0)
"""Bounds of reading a tokenizer; one of 256,000 tokens takes some seconds and some 100 MB."""
AT_ONCE: Final = 4
"""Conversations that are rendered at the same time."""
_MOST_IDLE: Final = 2
_MOST_ANSWERS: Final = 1000
"""After so many a process is ended: nothing grows for ever."""


class Model(NamedTuple):
    """What a conversation is rendered with."""

    sources: tuple[tuple[str, str], ...]
    """Sources of templates by name."""
    special: tuple[tuple[str, str], ...]
    """Texts of special tokens by name."""


class TokenizerCrashError(Exception):
    """Reading a tokenizer crashed, or took too long or too much memory."""


class Renderers:
    """Belongs to an event loop."""

    def __init__(self) -> None:
        self._server = ForkServer(__name__, None)
        self._turns = Turns(AT_ONCE)
        self._idle: dict[Model, list[Forked]] = {}

    def close(self) -> None:
        """Ends the processes."""
        self._server.close()

    async def check_tokenizer(self, folder: str) -> None:
        """Reads a folder's tokenizer in a process that may end.

        Raises:
            TokenizerCrashError: it ended. Errors of other kinds come again where it is read.
        """
        try:
            await self._server.ask("read", folder.encode(), READ)
        except (WorkEndedError, WorkLateError):
            raise TokenizerCrashError from None

    async def render(self, model: Model, chat: api.ChatPrompt, sharer: str) -> str:
        """Text of a conversation; see `router.requests.chat_template.render`.

        Raises:
            ChatTemplateError: there is no template, it refuses the turns, or met its bounds.
        """
        async with self._turns.turn(sharer):
            try:
                answer = await self._ask(model, chat.SerializeToString())
            except (WorkEndedError, WorkLateError):
                rule = "the chat template takes too long or too much memory for these turns"
                raise ChatTemplateError(rule) from None
        found = json.loads(answer)
        if "rule" in found:
            raise ChatTemplateError(found["rule"], found["field"])
        return str(found["text"])

    async def _ask(self, model: Model, question: bytes) -> bytes:
        idle = self._idle.setdefault(model, [])
        while idle:
            process = idle.pop()
            try:
                return await self._answer(process, model, question)
            except WorkEndedError:
                if not process.was_gone:
                    raise
        process = await self._server.fork("render", BOUNDS)
        try:
            await process.ask(pickle.dumps(model))
        except BaseException:
            process.close()
            raise
        return await self._answer(process, model, question)

    async def _answer(self, process: Forked, model: Model, question: bytes) -> bytes:
        try:
            answer = await process.ask(question)
        except BaseException:
            process.close()
            raise
        idle = self._idle[model]
        if len(idle) < _MOST_IDLE and process.answers < _MOST_ANSWERS:
            idle.append(process)
        else:
            process.close()
        return answer


def prepare(argument: Any) -> dict[str, Callable[[bytes], bytes]]:
    """What the fork server does: see `router.aside.server`."""
    return {"render": _Rendering(), "read": _read}


class _Rendering:
    """In a process of its own: the first question names the model."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._templates = Templates({})

    def __call__(self, question: bytes) -> bytes:
        if self._model is None:
            self._model = pickle.loads(question)
            self._templates = Templates(dict(self._model.sources))
            return b""
        chat = api.ChatPrompt.FromString(question)
        try:
            text = render(self._templates, dict(self._model.special), chat)
        except ChatTemplateError as error:
            return json.dumps({"rule": error.rule, "field": error.field}).encode()
        return json.dumps({"text": text}).encode()


def _read(folder: bytes) -> bytes:
    try:
        read_tokenizer(Path(folder.decode()))
    except MemoryError:
        raise
    except Exception:  # Whoever reads it again gets the error.
        return b"refused"
    return b"read"
