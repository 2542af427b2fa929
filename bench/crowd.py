"""Routers between workers and clients that compute nothing; `bench.stream_cost` reads them.

A worker sends the tokens of all streams of a step in one message. Or a prefill and a decode worker
answer each request (`Crowd.prompt_tokens`): grant, first token, delivery, and every further token
in a message of its own. Each router, the workers and the clients are processes, so that a router's
CPU time is its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import ssl
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc.aio
import tokenizers

from baton.client.channels import TLS_SCHEME, open_aio_channel
from baton.grpc_options import channel_options, server_options
from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc
from baton.tls import NO_FILES, TlsFiles, holders_files
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from bench.parts import Parts, Stopwatch
from router.server import RouterServer
from router.settings import RouterDebug, RouterSettings
from serving import garbage
from serving.event_loop import loop_factory, prepare_to_serve
from serving.release import stamp
from serving.wire import pack_ids
from telemetry.names import Metric

CORPUS = Path(__file__).parent / "README.md"
ANY = "127.0.0.1:0"
PATIENCE_S = 60.0
REPORT_S = 0.1
MAX_TOKENS = 1 << 15
"""Tokens of a stream: more than come."""
VOCAB = 4096
STREAMS_A_CHANNEL = 16
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Crowd(NamedTuple):
    """What the processes of one run agree on."""

    door: str
    streams: int
    """Streams of each router."""
    step_s: float
    folder: str
    """Holds the tokenizer, and certificates."""
    tls: bool = False
    """Whether the door speaks TLS."""
    prompt_tokens: int = 0
    """Prompt of each request, which ends after `output_tokens`; 0: streams that do not end."""
    output_tokens: int = 8
    chat: bool = False
    """Whether requests are conversations, and not ids."""
    parts: bool = False
    """Whether a router notes where its time goes."""
    callbacks: bool = False
    """Whether a router measures each callback of its loop."""

    @property
    def files(self) -> TlsFiles:
        """What its clients trust."""
        return TlsFiles(holders_files(self.folder, "router").ca) if self.tls else NO_FILES

    @property
    def roles(self) -> list[worker_pb2.WorkerRole.ValueType]:
        """Roles of its workers."""
        if self.prompt_tokens:
            return [worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE]
        return [worker_pb2.WORKER_ROLE_BOTH]


class StandInWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that computes nothing. Streams get a token each every step, once a router has sent
    all of its; requests are answered at once."""

    def __init__(self, crowd: Crowd, port: int, role: worker_pb2.WorkerRole.ValueType) -> None:
        self._crowd = crowd
        backend = tokenizers.Tokenizer.from_file(f"{crowd.folder}/tokenizer.json")
        self._text = backend.encode(CORPUS.read_text(encoding="utf-8")).ids
        name = worker_pb2.WorkerRole.Name(role)
        self.identity = worker_pb2.WorkerIdentity(
            worker_id=name,
            epoch=1,
            address=f"127.0.0.1:{port}",
            role=role,
            model=worker_pb2.ModelInfo(
                name="bench",
                path=crowd.folder,
                fingerprint="f",
                max_context_tokens=1 << 20,
                vocab_size=VOCAB,
                page_size_tokens=16,
                eos_token_ids=[0],
            ),
            endpoint=worker_pb2.KvEndpoint(agent_name=name, transport="null"),
        )
        stamp(self.identity)

    async def Work(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.WorkRequest], context: Any
    ) -> AsyncIterator[worker_pb2.WorkResponse]:
        """The stream to a router; it ends with the process."""
        await anext(request_iterator)
        yield worker_pb2.WorkResponse(attached=worker_pb2.Attached(worker=self.identity))
        yield self._load(0)
        answers: asyncio.Queue[worker_pb2.WorkResponse] = asyncio.Queue(64)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read(request_iterator, answers))
            group.create_task(self._report(answers))
            while True:
                yield await answers.get()

    async def _report(self, answers: asyncio.Queue[worker_pb2.WorkResponse]) -> None:
        for progress in itertools.count(1):
            await asyncio.sleep(REPORT_S)
            await answers.put(self._load(progress))

    async def _read(
        self,
        requests: AsyncIterator[worker_pb2.WorkRequest],
        answers: asyncio.Queue[worker_pb2.WorkResponse],
    ) -> None:
        attempts: list[bytes] = []
        tasks = set()
        async for request in requests:
            kind = request.WhichOneof("message")
            if self._crowd.prompt_tokens and kind in ("submit", "grant"):
                attempt_id = getattr(request, kind).attempt_id
                role = self.identity.role
                if kind == "grant":
                    tasks.add(asyncio.create_task(self._prefill(attempt_id, answers)))
                elif role == worker_pb2.WORKER_ROLE_DECODE:
                    tasks.add(asyncio.create_task(self._decode(request.submit, answers)))
                tasks = {task for task in tasks if not task.done()}
            elif kind == "submit":
                attempts.append(request.submit.attempt_id)
                if len(attempts) == self._crowd.streams:
                    tasks.add(asyncio.create_task(self._stream(attempts, answers)))

    async def _stream(
        self, attempts: list[bytes], answers: asyncio.Queue[worker_pb2.WorkResponse]
    ) -> None:
        next_s = time.perf_counter()
        for index in itertools.count():
            await answers.put(self._step(attempts, index))
            next_s += self._crowd.step_s
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))

    async def _prefill(
        self, attempt_id: bytes, answers: asyncio.Queue[worker_pb2.WorkResponse]
    ) -> None:
        record = worker_pb2.TokenRecord(token_id=self._text[0])
        first = worker_pb2.FirstToken(attempt_id=attempt_id, records=[record])
        await answers.put(worker_pb2.WorkResponse(first_token=first))
        done = worker_pb2.PrefillDone(attempt_id=attempt_id)
        await answers.put(worker_pb2.WorkResponse(prefill_done=done))

    async def _decode(
        self, submit: worker_pb2.Submit, answers: asyncio.Queue[worker_pb2.WorkResponse]
    ) -> None:
        attempt_id, tokens = submit.attempt_id, submit.stopping.max_tokens
        pages = len(submit.prompt_ids) // 64 + 1
        grant = worker_pb2.Grant(
            attempt_id=attempt_id,
            transfer_id=attempt_id,
            decode_epoch=1,
            decode_agent_name=self.identity.endpoint.agent_name,
            page_ids=pack_ids(range(1, pages + 1)),
        )
        await answers.put(worker_pb2.WorkResponse(granted=grant))
        await asyncio.sleep(self._crowd.step_s)
        delivered = worker_pb2.Delivered(attempt_id=attempt_id)
        await answers.put(worker_pb2.WorkResponse(delivered=delivered))
        for index in range(tokens):
            await answers.put(self._step([attempt_id], index))
            await asyncio.sleep(self._crowd.step_s)
        reason = worker_pb2.END_REASON_LENGTH
        end = worker_pb2.Finished(attempt_id=attempt_id, reason=reason, output_tokens=tokens)
        await answers.put(worker_pb2.WorkResponse(finished=end))

    def _load(self, progress: int) -> worker_pb2.WorkResponse:
        load = worker_pb2.Load(
            progress=progress + 1,
            max_sequences=1 << 12,
            total_pages=1 << 20,
            free_pages=1 << 20,
            prefill_credit_tokens=1 << 20,
        )
        return worker_pb2.WorkResponse(load=load)

    def _step(self, attempts: list[bytes], index: int) -> worker_pb2.WorkResponse:
        """Each stream says the same text, begun elsewhere."""
        rows, text = len(attempts), self._text
        tokens = worker_pb2.Tokens(
            attempt_ids=attempts,
            choice_indices=bytes(4 * rows),
            indices=pack_ids([index] * rows),
            token_ids=pack_ids([text[(index + 37 * row) % len(text)] for row in range(rows)]),
        )
        return worker_pb2.WorkResponse(tokens=tokens)


async def be_workers(crowd: Crowd, internal: list[str]) -> None:
    """Runs the workers of all routers until it is killed."""
    identities = []
    for role in crowd.roles:
        server = grpc.aio.server(options=server_options())
        worker = StandInWorker(crowd, server.add_insecure_port(ANY), role)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        await server.start()
        identities.append((server, worker.identity))
    for address in internal:
        async with grpc.aio.insecure_channel(address) as channel:
            registry = worker_pb2_grpc.RegistryServiceStub(channel)
            for _, identity in identities:
                await registry.Announce(worker_pb2.AnnounceRequest(worker=identity))
    await asyncio.Event().wait()


async def be_clients(crowd: Crowd, addresses: list[str]) -> None:
    """Reads all streams to their ends, and looks into no message. Requests follow each other."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for address in addresses:
            if crowd.door == "http":
                context = crowd.files.client_context() if crowd.tls else None
                for _ in range(crowd.streams):
                    group.create_task(_again(crowd, read_http, crowd, address, context))
                continue
            stubs = []
            for _ in range(-(-crowd.streams // STREAMS_A_CHANNEL)):
                channel = open_aio_channel(
                    f"{TLS_SCHEME * crowd.tls}{address}", channel_options(), crowd.files
                )
                await (await stack.enter_async_context(channel)).channel_ready()
                stubs.append(inference_pb2_grpc.InferenceServiceStub(channel))
            for _, stub in zip(range(crowd.streams), itertools.cycle(stubs), strict=False):
                group.create_task(_again(crowd, read_grpc, crowd, stub))


async def _again(crowd: Crowd, read: Any, *args: Any) -> None:
    await read(*args)
    while crowd.prompt_tokens:
        await read(*args)
    raise RuntimeError("a stream ended early")


def turn_of(prompt_tokens: int) -> str:
    """A turn of about the prompt's length."""
    return CORPUS.read_text(encoding="utf-8")[: 3 * prompt_tokens]


async def read_grpc(crowd: Crowd, stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> None:
    """One stream of the gRPC API."""
    wanted = api.GenerationInput(token_ids=api.TokenIds(ids=[7] * (crowd.prompt_tokens or 3)))
    if crowd.chat:
        turn = api.ChatMessage(role=api.ROLE_USER, content=turn_of(crowd.prompt_tokens))
        wanted = api.GenerationInput(chat=api.ChatPrompt(messages=[turn]))
    most = crowd.output_tokens if crowd.prompt_tokens else MAX_TOKENS
    wanted.stop.CopyFrom(api.StopOptions(max_tokens=most, ignore_eos=True))
    async for _ in stub.StreamGenerate(api.StreamGenerateRequest(input=wanted)):
        pass


async def read_http(crowd: Crowd, address: str, context: ssl.SSLContext | None) -> None:
    """One stream of the OpenAI API, on a connection of its own."""
    path = "completions"
    body: dict[str, object] = {"prompt": [7] * (crowd.prompt_tokens or 3)}
    if crowd.chat:
        path, body = (
            "chat/completions",
            {"messages": [{"role": "user", "content": turn_of(crowd.prompt_tokens)}]},
        )
    most = crowd.output_tokens if crowd.prompt_tokens else MAX_TOKENS
    content = json.dumps(
        {"model": "bench", **body, "max_tokens": most, "ignore_eos": True, "stream": True}
    ).encode()
    host, _, port = address.rpartition(":")
    name = "localhost" if context else None
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=context, server_hostname=name
    )
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    close = f"connection: close\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write((head + close).encode() + content)
    first = await reader.read(1 << 16)
    if b" 200 " not in first[:20]:
        raise RuntimeError(f"the router answered {first[:400]!r}")
    while await reader.read(1 << 16):
        pass
    writer.close()


class Reading(NamedTuple):
    """A router process at a moment."""

    cpu_s: float
    loop_s: float
    """CPU time of its event loop's thread."""
    wall_s: float
    tokens: float
    messages: float
    """A choice's first one is not among them."""
    requests: float
    parts: dict[str, float]
    """Shares of the loop's busy time, where they are noted."""
    callbacks: Sequence[Any]
    """`Callbacks` since the reading before, where they are measured."""

    @classmethod
    def of(cls, server: RouterServer, parts: Parts | None, watch: Stopwatch | None) -> Self:
        """Now. The loop's thread calls it."""
        value, labels = server.metrics.registry.get_sample_value, {"model": "bench"}
        ended = {"model": "bench", "outcome": "OK"}
        return cls(
            time.process_time(),
            time.thread_time(),
            time.perf_counter(),
            value(Metric.OUTPUT_TOKENS + "_total", labels) or 0.0,
            value(Metric.INTER_TOKEN + "_count", labels) or 0.0,
            value(Metric.REQUESTS + "_total", ended) or 0.0,
            parts.shares() if parts else {},
            watch.look() if watch else (),
        )


async def be_router(crowd: Crowd, _: list[str]) -> None:
    """Runs a router. It says its addresses, and then a reading for each line that it is sent."""
    logging.disable()  # How it ends is meant.
    settings = RouterSettings(
        listen=ANY,
        internal_listen=ANY,
        http_listen=ANY,
        fast_listen=ANY,
        admin=ANY,
        tls_door_cert=holders_files(crowd.folder, "router").cert if crowd.tls else "",
        tls_door_key=holders_files(crowd.folder, "router").key if crowd.tls else "",
        debug=RouterDebug(stale_after_s=PATIENCE_S, attach_timeout_s=PATIENCE_S, drain_grace_s=0),
    )
    server = RouterServer(settings)
    await server.start()
    garbage.set_apart()
    assert server.fast_door is not None
    doors = {
        "http": server.http_address,
        "grpc": server.address,
        "fast": server.fast_door.address,
    }
    door = doors[crowd.door]
    print(json.dumps([door, server.internal_address, server.admin.address]), flush=True)
    parts = Parts() if crowd.parts else None
    watch = Stopwatch() if crowd.callbacks else None
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(Reading.of(server, parts, watch)), flush=True)
    os._exit(0)  # Streams are under way, and their ends would take a while.


ROLES = {"workers": be_workers, "clients": be_clients, "router": be_router}


def be(role: str, crowd: str, addresses: str, cores: str) -> None:
    """Is one of the processes."""
    if cores:
        os.sched_setaffinity(0, _cores(cores))
    prepare_to_serve()
    given = Crowd(*json.loads(crowd))
    with asyncio.Runner(loop_factory=None if given.callbacks else loop_factory()) as runner:
        runner.run(ROLES[role](given, json.loads(addresses)))


def _cores(text: str) -> set[int]:
    """Numbers of a list such as `0,2-5`."""
    ends = (part.split("-") for part in text.split(","))
    return {core for one in ends for core in range(int(one[0]), int(one[-1]) + 1)}


@asynccontextmanager
async def a_process(
    role: str, crowd: Crowd, addresses: Iterable[str] = (), cores: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process of the run."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.stream_cost", "--as", role),
        *(json.dumps(crowd), json.dumps([*addresses]), cores),
        stdin=pipe,
        stdout=pipe,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def write_tokenizer(folder: Path) -> None:
    """A byte-level one with the words of a page of ours, and a chat template."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([str(CORPUS)], trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
