"""OpenAI's API over the model of an LLM, on this machine's loopback and for one caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from local.llm import LLM
from router.doors.auth import KeyGate
from router.doors.openai.server import OpenAiServer


@contextmanager
def served(llm: LLM, key: str) -> Iterator[str]:
    """Serves the LLM within the block, to callers that show the key. Yields HOST:PORT."""
    server = llm._loop.run(_start(llm, key))
    try:
        yield server.address
    finally:
        llm._loop.run(server.stop())


async def _start(llm: LLM, key: str) -> OpenAiServer:
    own = llm._service
    given = own._dispatcher, own._tokenizers, own._limits
    server = OpenAiServer("127.0.0.1:0", *given, gate=KeyGate(key))
    await server.start()
    return server
