"""What the front door's tests share: real tokenizers, a scripted dispatcher, a real channel."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
import tokenizers
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from baton.grpc_options import channel_options, public_server_options
from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc as api_grpc
from baton.worker.v1 import worker_pb2
from router import errors
from router.doors.auth import OPEN, Gate
from router.doors.frontdoor import InferenceService
from router.doors.grpc_edge import DETAILS_KEY
from router.doors.http2.server import FastDoor
from router.events import NO_EVENTS, RouterEvents
from router.jobs import (
    ChoiceEnded,
    Job,
    JobEvent,
    JobFinished,
    JobStarted,
    JobTimings,
    JobTokens,
    ServedModel,
)
from router.quotas import Quotas
from router.requests.bounds import BodyShape
from router.requests.tokenization import Tokenizer, Tokenizers
from router.requests.validation import Limits

Detail = TypeVar("Detail", bound=Message)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Pack my box with five dozen jugs!",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich — naïve café.",
    "いろはにほへと ちりぬるを 我が世誰ぞ 常ならむ",
    "Съешь же ещё этих мягких французских булок 👩‍👩‍👧 🎉 🚀",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """Every byte is a token, some words are longer ones, as in GPT-2 and Llama 3."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    """Words with a leading mark for a space, bytes for all else, as in Llama 2."""
    words = ["▁the", "▁fox", "▁", "the", "fox", "a", "b", "c", "!", "▁▁", "é"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def load(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder."""
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer is not None
    return tokenizer


def write_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Writes a byte-level tokenizer and its chat template as a model folder holds them."""
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer


def served_model(path: Path | str, name: str = "tiny", max_context_tokens: int = 64) -> ServedModel:
    return ServedModel(
        name=name,
        revision="r1",
        path=str(path),
        max_context_tokens=max_context_tokens,
        vocab_size=512,
        eos_token_ids=(2,),
        page_size_tokens=16,
        extensions=frozenset({"quest"}),
    )


Script = Callable[[Job], AsyncGenerator[JobEvent, None]]


@dataclass
class ScriptedDispatcher:
    """A `router.jobs.Dispatcher` that plays a script for every job."""

    served: Sequence[ServedModel]
    script: Script
    pool_tokens: int | None = None
    quotas: Quotas = field(default_factory=Quotas)
    jobs: list[Job] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    """Choices that the front door ended."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the work on a job has ended, however."""

    def models(self) -> Sequence[ServedModel]:
        return self.served

    def model(self, name: str) -> ServedModel:
        if not self.served:
            raise errors.no_workers(name)
        named = [model for model in self.served if name in ("", model.called)]
        if len(named) != 1:
            raise errors.model_not_found(name, [model.called for model in self.served])
        return named[0]

    def largest_pool_tokens(self, job: Job) -> int | None:
        return self.pool_tokens

    async def run(self, job: Job, send: Callable[[JobEvent], None]) -> None:
        self.jobs.append(job)
        events = self.script(job)
        try:
            async for event in events:
                send(event)
        finally:
            await events.aclose()
            self.closed.set()

    def end_choice(self, job: Job, choice: int) -> None:
        assert job is self.jobs[-1]
        self.ended.append(choice)


TIMINGS = JobTimings(1_000_000, 2_000_000, 3_000_000, 4_000_000, 5_000_000)


def plays(
    *outputs: Sequence[int], reason: worker_pb2.EndReason.ValueType = worker_pb2.END_REASON_LENGTH
) -> Script:
    """One token an event, choices in turn, then the end of each."""

    async def script(job: Job) -> AsyncGenerator[JobEvent, None]:
        yield JobStarted(cached_prompt_tokens=1)
        for index in range(max(map(len, outputs))):
            for choice, output in enumerate(outputs):
                if index < len(output):
                    yield JobTokens(choice, index, (output[index],))
        for choice, output in enumerate(outputs):
            yield ChoiceEnded(choice, reason, len(output))
        yield JobFinished(TIMINGS, cached_prompt_tokens=1)

    return script


def fails(error: BaseException, after: Sequence[int] = ()) -> Script:
    """Some tokens, then an error."""

    async def script(job: Job) -> AsyncGenerator[JobEvent, None]:
        if after:
            yield JobStarted()
            yield JobTokens(0, 0, tuple(after))
        raise error

    return script


async def hangs(job: Job) -> AsyncGenerator[JobEvent, None]:
    """One token, and nothing after it."""
    yield JobStarted()
    yield JobTokens(0, 0, (70,))
    await asyncio.Event().wait()


@dataclass
class Door:
    """A served front door and a channel to it."""

    dispatcher: ScriptedDispatcher
    channel: grpc.aio.Channel
    stub: api_grpc.InferenceServiceAsyncStub
    address: str


async def grpcs_door(
    service: InferenceService, interceptors: Sequence[grpc.aio.ServerInterceptor]
) -> tuple[Any, str]:
    """gRPC's own server, and its address."""
    server = grpc.aio.server(
        options=public_server_options(64, 600), interceptors=list(interceptors)
    )
    service.add_to_server(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"


async def fast_door(
    service: InferenceService, interceptors: Sequence[grpc.aio.ServerInterceptor] = ()
) -> tuple[Any, str]:
    """The fast door, and its address. It has the interceptor of routers."""
    door = FastDoor("127.0.0.1:0", BodyShape(service._dispatcher.models), 64, 600)
    service.add_to_server(door)
    await door.start()
    return door, door.address


DOORS: list[Callable[..., Awaitable[tuple[Any, str]]]] = [grpcs_door]
"""The last one is the door that tests open."""


@asynccontextmanager
async def open_door(
    dispatcher: ScriptedDispatcher,
    limits: Limits | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    events: RouterEvents = NO_EVENTS,
    gate: Gate = OPEN,
) -> AsyncIterator[Door]:
    """Serves the front door on a free port."""
    tokenizers_ = Tokenizers()
    service = InferenceService(dispatcher, tokenizers_, limits, events, gate)
    server, address = await DOORS[-1](service, interceptors)
    for model in dispatcher.served:  # As a router does before it opens its doors.
        with suppress(Exception):
            await tokenizers_.get(model.path)
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        yield Door(dispatcher, channel, api_grpc.InferenceServiceStub(channel), address)
    await server.stop(0)
    tokenizers_.close()


@dataclass
class Refusal:
    """A status as the client sees it."""

    code: grpc.StatusCode
    message: str
    status: status_pb2.Status

    @property
    def info(self) -> error_details_pb2.ErrorInfo:
        return self.detail(error_details_pb2.ErrorInfo)

    def detail(self, kind: type[Detail]) -> Detail:
        found = kind()
        assert any(packed.Unpack(found) for packed in self.status.details), kind
        return found

    def has(self, kind: type[Message]) -> bool:
        return any(packed.Is(kind.DESCRIPTOR) for packed in self.status.details)

    @property
    def fields(self) -> list[str]:
        return [
            violation.field
            for violation in self.detail(error_details_pb2.BadRequest).field_violations
        ]


def refusal(error: grpc.aio.AioRpcError) -> Refusal:
    """Reads the details out of the trailers."""
    packed = dict(error.trailing_metadata())[DETAILS_KEY]
    status = status_pb2.Status.FromString(packed)
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    return Refusal(error.code(), error.details() or "", status)


async def read(
    stub: api_grpc.InferenceServiceAsyncStub,
    prompt: api.GenerationInput,
    into: list[api.StreamGenerateResponse] | None = None,
) -> list[api.StreamGenerateResponse]:
    """Reads a stream to its end; `into` keeps what came before an error."""
    messages = [] if into is None else into
    call = stub.StreamGenerate(api.StreamGenerateRequest(input=prompt), timeout=20)
    async for message in call:
        messages.append(message)
    return messages


def ids_input(*token_ids: int) -> api.GenerationInput:
    """A prompt of ids."""
    return api.GenerationInput(token_ids=api.TokenIds(ids=token_ids or (70, 71, 72)))


def access_lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The access log, a line as the fields that its formatter gets."""
    return [vars(one) for one in caplog.records if one.name == "baton.access"]
