"""What the tests of the OpenAI-compatible API share: a served port, the official client."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from frontdoor_kit import Script, ScriptedDispatcher, served_model, write_tokenizer
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from baton.worker.v1 import worker_pb2
from router.doors.auth import OPEN, Gate
from router.doors.batches.store import FileStore
from router.doors.openai.server import OpenAiServer
from router.doors.responses.store import ResponseStore
from router.events import NO_EVENTS, RouterEvents
from router.jobs import (
    ChoiceEnded,
    Job,
    JobEvent,
    JobFinished,
    JobStarted,
    JobTokens,
    TokenScore,
)
from router.requests.tokenization import Tokenizer, Tokenizers
from router.requests.validation import Limits

IN_CLEAR = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Trusts nobody: to read all certificates takes 30 ms, and these ports have no TLS."""


@cache
def tokenizer_in(folder: str) -> Tokenizer:
    """As `write_tokenizer` wrote it, which takes its time to be read."""
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return tokenizer


@dataclass
class Port:
    """A served API and the official client on it."""

    dispatcher: ScriptedDispatcher
    client: AsyncOpenAI
    tokenizer: Tokenizer
    server: OpenAiServer

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.address.rpartition(":")
        return host, int(port)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).tolist()

    @property
    def job(self) -> Job:
        """The latest."""
        return self.dispatcher.jobs[-1]


@asynccontextmanager
async def open_port(
    folder: Path,
    script: Script,
    *,
    events: RouterEvents = NO_EVENTS,
    gate: Gate = OPEN,
    limits: Limits | None = None,
    max_context_tokens: int = 256,
    store: ResponseStore | None = None,
    files: FileStore | None = None,
    **client_options: object,
) -> AsyncIterator[Port]:
    """Serves a model with a tokenizer on a free port."""
    write_tokenizer(folder)
    tokenizer = tokenizer_in(str(folder))
    dispatcher = ScriptedDispatcher(
        [served_model(folder, max_context_tokens=max_context_tokens)], script
    )
    tokenizers = Tokenizers()
    limits = limits or Limits()
    server = OpenAiServer(
        "127.0.0.1:0", dispatcher, tokenizers, limits, events, gate=gate, store=store, files=files
    )
    await server.start()
    url = f"http://{server.address}/v1"
    options = {"max_retries": 0, "timeout": 20.0, "api_key": "none", **client_options}
    http_client = DefaultAsyncHttpxClient(verify=IN_CLEAR)
    try:
        async with AsyncOpenAI(base_url=url, http_client=http_client, **options) as client:
            yield Port(dispatcher, client, tokenizer, server)
    finally:
        await server.stop()
        tokenizers.close()


def answers(
    ids_of: Callable[[Job, int], Sequence[int]],
    reason: worker_pb2.EndReason.ValueType = worker_pb2.END_REASON_LENGTH,
    logprob: float | None = None,
) -> Script:
    """One token an event, choices in turn, scored where that is asked for."""

    async def script(job: Job) -> AsyncGenerator[JobEvent, None]:
        outputs = [list(ids_of(job, choice)) for choice in range(job.choices)]
        scores = ()
        if job.prompt_logprobs:
            scores = tuple(score(job, one) for one in job.prompt_ids[1:].tolist())
        yield JobStarted(cached_prompt_tokens=1, prompt_logprobs=scores)
        for index in range(max(map(len, outputs))):
            for choice, output in enumerate(outputs):
                if index < len(output):
                    token = output[index]
                    scored = job.sampling.HasField("top_logprobs")
                    logprobs = (score(job, token, logprob),) if scored else ()
                    yield JobTokens(choice, index, (token,), logprobs)
        for choice, output in enumerate(outputs):
            yield ChoiceEnded(choice, reason, len(output))
        yield JobFinished(cached_prompt_tokens=1)

    return script


def score(job: Job, token_id: int, logprob: float | None = None) -> TokenScore:
    """-id/100, and as alternatives the token itself and the ids below it."""
    top = range(token_id, token_id - job.sampling.top_logprobs, -1)
    return TokenScore(
        -token_id / 100 if logprob is None else logprob,
        tuple(top),
        tuple(-(token_id + index) / 100 for index in range(len(top))),
    )


def says(
    *texts: str, reason: worker_pb2.EndReason.ValueType = worker_pb2.END_REASON_LENGTH
) -> Script:
    """Each choice says its text; the last one's is that of all further ones."""

    def ids_of(job: Job, choice: int) -> Sequence[int]:
        tokenizer = tokenizer_in(job.model.path)
        return tokenizer.encode(texts[min(choice, len(texts) - 1)]).tolist()

    return answers(ids_of, reason)


def prompt_of(job: Job) -> list[int]:
    return job.prompt_ids.tolist()
