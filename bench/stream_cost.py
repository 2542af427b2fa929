"""CPU that a router takes for each token of its streams.

    python -m bench.stream_cost [--tokens N]
    python -m bench.stream_cost --crowd [--tls] [--door grpc|http] [--streams N] [--step-ms MS]

Alone: one stream of the gRPC door, over a dispatcher that hands it tokens, by how many share a
message. Tokenizing is left out (`omit_text`), and so are the workers: `bench.step_cost` has those.
A message holds one token for as long as its reader keeps up, so these are the costs at both ends of
what a slow reader is worth.

The crowd: a whole router, as its process composes it. A worker sends the tokens of all streams of a
step in one message, and clients read text; both are processes of their own, whose time does not
count. Tokens that come faster than the router can write them share a message: the line says how
many did, and steps further apart give the cost of a token by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import tokenizers

from baton.client.channels import TLS_SCHEME, open_aio_channel
from baton.grpc_options import channel_options, server_options
from baton.inference.v1 import inference_pb2 as api
from baton.inference.v1 import inference_pb2_grpc
from baton.tls import NO_FILES, TlsFiles, holders_files
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from router.doors.frontdoor import InferenceService
from router.jobs import ChoiceEnded, Job, JobEvent, JobFinished, JobStarted, JobTokens, ServedModel
from router.quotas import Quotas
from router.requests.tokenization import Tokenizers
from router.server import RouterServer
from router.settings import RouterDebug, RouterSettings
from serving.event_loop import loop_factory
from serving.net.certificates import write_set
from serving.release import stamp
from serving.wire import pack_ids
from telemetry.names import Metric

MODEL = ServedModel("bench", "r", "/nowhere", 1 << 20, 1 << 16, (), 16)
READER = """
import sys
from baton.client.clients import Client
with Client(sys.argv[1]) as client:
    for _ in client.stream(token_ids=[1], max_tokens=int(sys.argv[2]), omit_text=True):
        pass
"""
CORPUS = Path(__file__).parent / "README.md"
ANY = "127.0.0.1:0"
RUNS = 3
WARM_UP_S = 1.5
PATIENCE_S = 60.0
MAX_TOKENS = 1 << 15
"""Of a stream: more than come."""
STREAMS_A_CHANNEL = 16


class Merged:
    """A dispatcher whose every job gets its tokens so many at a time."""

    def __init__(self, per_message: int) -> None:
        self._per_message = per_message
        self.cpu_s = 0.0
        self.quotas = Quotas()

    def models(self) -> Sequence[ServedModel]:
        """The one."""
        return [MODEL]

    def model(self, name: str) -> ServedModel:
        """The one."""
        return MODEL

    def largest_pool_tokens(self, job: Job) -> int | None:
        """No bound."""
        return None

    def end_choice(self, job: Job, choice: int) -> None:
        """Not here."""

    async def run(self, job: Job, tell: Callable[[JobEvent], None]) -> None:
        """All tokens."""
        tell(JobStarted())
        began_s, total = time.process_time(), job.stopping.max_tokens
        for first in range(0, total, self._per_message):
            tell(JobTokens(0, first, tuple(range(self._per_message))))
            await asyncio.sleep(5e-4)  # Longer than a write takes: nothing waits behind another.
        self.cpu_s = time.process_time() - began_s
        tell(ChoiceEnded(0, worker_pb2.END_REASON_LENGTH, total))
        tell(JobFinished())


async def microseconds_a_token(per_message: int, tokens: int) -> float:
    """Runs one stream."""
    dispatcher = Merged(per_message)
    of_models = Tokenizers()
    server = grpc.aio.server(options=server_options())
    InferenceService(dispatcher, of_models).add_to_server(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, f"127.0.0.1:{port}", str(tokens)
    )
    assert await reader.wait() == 0
    await server.stop(None)
    of_models.close()
    return dispatcher.cpu_s / tokens * 1e6


class Crowd(NamedTuple):
    """What the processes of one run agree on."""

    door: str
    streams: int
    step_s: float
    seconds: float
    """Measured."""
    folder: str
    """Holds the tokenizer, and certificates."""
    tls: bool = False
    """Whether the door speaks TLS."""

    @property
    def files(self) -> TlsFiles:
        """What its clients trust."""
        return TlsFiles(holders_files(self.folder, "router").ca) if self.tls else NO_FILES


class StepWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that computes nothing: once all streams are here, a token for each every step."""

    def __init__(self, crowd: Crowd, port: int) -> None:
        self._crowd = crowd
        self._attempts: list[bytes] = []
        self._all_here = asyncio.Event()
        backend = tokenizers.Tokenizer.from_file(f"{crowd.folder}/tokenizer.json")
        self._text = backend.encode(CORPUS.read_text(encoding="utf-8")).ids
        self.identity = worker_pb2.WorkerIdentity(
            worker_id="w",
            epoch=1,
            address=f"127.0.0.1:{port}",
            role=worker_pb2.WORKER_ROLE_BOTH,
            model=worker_pb2.ModelInfo(
                name="bench",
                path=crowd.folder,
                max_context_tokens=1 << 20,
                vocab_size=backend.get_vocab_size(),
                page_size_tokens=16,
            ),
        )
        stamp(self.identity)

    async def Work(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.WorkRequest], context: Any
    ) -> AsyncIterator[worker_pb2.WorkResponse]:
        """The stream to the router; it ends with the process."""
        await anext(request_iterator)
        yield worker_pb2.WorkResponse(attached=worker_pb2.Attached(worker=self.identity))
        yield self._load(0)
        reading = asyncio.create_task(self._read(request_iterator))
        await self._all_here.wait()
        next_s = time.perf_counter()
        for index in itertools.count():
            yield worker_pb2.WorkResponse(tokens=self._step(index))
            if index % 16 == 0:
                yield self._load(index + 1)
            next_s += self._crowd.step_s
            await asyncio.sleep(max(0.0, next_s - time.perf_counter()))
        await reading  # Never reached: the process is killed.

    async def _read(self, requests: AsyncIterator[worker_pb2.WorkRequest]) -> None:
        async for request in requests:
            if request.HasField("submit"):
                self._attempts.append(request.submit.attempt_id)
            if len(self._attempts) == self._crowd.streams:
                self._all_here.set()

    def _load(self, progress: int) -> worker_pb2.WorkResponse:
        load = worker_pb2.Load(
            progress=progress + 1,
            max_sequences=1 << 12,
            total_pages=1 << 20,
            free_pages=1 << 20,
            prefill_credit_tokens=1 << 20,
        )
        return worker_pb2.WorkResponse(load=load)

    def _step(self, index: int) -> worker_pb2.Tokens:
        """Each stream says the same text, begun elsewhere."""
        rows, text = len(self._attempts), self._text
        return worker_pb2.Tokens(
            attempt_ids=self._attempts,
            choice_indices=bytes(4 * rows),
            indices=pack_ids([index] * rows),
            token_ids=pack_ids([text[(index + 37 * row) % len(text)] for row in range(rows)]),
        )


async def be_worker(crowd: Crowd, internal_address: str) -> None:
    """Runs the worker until it is killed."""
    server = grpc.aio.server(options=server_options())
    worker = StepWorker(crowd, server.add_insecure_port(ANY))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    await server.start()
    async with grpc.aio.insecure_channel(internal_address) as channel:
        registry = worker_pb2_grpc.RegistryServiceStub(channel)
        await registry.Announce(worker_pb2.AnnounceRequest(worker=worker.identity))
    await server.wait_for_termination()


async def be_clients(crowd: Crowd, address: str) -> None:
    """Reads all streams to their ends, and looks into no message."""
    if crowd.door == "http":
        context = crowd.files.client_context() if crowd.tls else None
        await asyncio.gather(*(read_http(address, context) for _ in range(crowd.streams)))
        return
    async with AsyncExitStack() as stack:
        stubs = []
        for _ in range(-(-crowd.streams // STREAMS_A_CHANNEL)):
            channel = open_aio_channel(
                f"{TLS_SCHEME * crowd.tls}{address}", channel_options(), crowd.files
            )
            await (await stack.enter_async_context(channel)).channel_ready()
            stubs.append(inference_pb2_grpc.InferenceServiceStub(channel))
        streams = zip(range(crowd.streams), itertools.cycle(stubs), strict=False)
        await asyncio.gather(*(read_grpc(stub) for _, stub in streams))


async def read_grpc(stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> None:
    """One stream of the gRPC API."""
    wanted = api.GenerationInput(token_ids=api.TokenIds(ids=[1, 2, 3]))
    wanted.stop.CopyFrom(api.StopOptions(max_tokens=MAX_TOKENS, ignore_eos=True))
    async for _ in stub.StreamGenerate(api.StreamGenerateRequest(input=wanted)):
        pass


async def read_http(address: str, context: ssl.SSLContext | None) -> None:
    """One stream of the OpenAI API, on a connection of its own."""
    body = {"prompt": [1, 2, 3], "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    content = json.dumps({"model": "bench", **body}).encode()
    host, _, port = address.rpartition(":")
    name = "localhost" if context else None
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=context, server_hostname=name
    )
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    while await reader.read(1 << 16):
        pass


class Reading(NamedTuple):
    """A router process at a moment."""

    cpu_s: float
    wall_s: float
    tokens: float
    messages: float

    @classmethod
    def of(cls, server: RouterServer) -> Reading:
        """Now; a choice's first message is not counted among the gaps."""
        value, labels = server.metrics.registry.get_sample_value, {"model": "bench"}
        return cls(
            time.process_time(),
            time.perf_counter(),
            value(Metric.OUTPUT_TOKENS + "_total", labels) or 0.0,
            value(Metric.INTER_TOKEN + "_count", labels) or 0.0,
        )


@asynccontextmanager
async def a_process(role: str, crowd: Crowd, address: str) -> AsyncIterator[Any]:
    """Another process of the run."""
    command = [sys.executable, "-m", "bench.stream_cost", "--as", role]
    process = await asyncio.create_subprocess_exec(*command, json.dumps(crowd), address)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def run_crowd(crowd: Crowd) -> tuple[Reading, Reading]:
    """The router before and behind some seconds of all streams."""
    logging.disable()  # How it ends is meant.
    settings = RouterSettings(
        listen=ANY,
        internal_listen=ANY,
        http_listen=ANY,
        admin=ANY,
        drain_grace_s=0,
        tls_door_cert=holders_files(crowd.folder, "router").cert if crowd.tls else "",
        tls_door_key=holders_files(crowd.folder, "router").key if crowd.tls else "",
        debug=RouterDebug(stale_after_s=PATIENCE_S, attach_timeout_s=PATIENCE_S),
    )
    server = RouterServer(settings)
    await server.start()
    address = server.http_address if crowd.door == "http" else server.address
    async with a_process("worker", crowd, server.internal_address):
        while not server.dispatcher.models():
            await asyncio.sleep(0.05)
        async with a_process("clients", crowd, address) as clients:
            reading = asyncio.create_task(clients.wait())
            while not (begun := Reading.of(server)).tokens and not reading.done():
                await asyncio.sleep(WARM_UP_S)
            await asyncio.sleep(crowd.seconds)
            ended = Reading.of(server)
            assert not reading.done(), "the clients failed"
    await server.stop()
    return begun, ended


def write_tokenizer(folder: Path) -> None:
    """A byte-level one with the words of a page of ours."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=4096,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([str(CORPUS)], trainer)
    backend.save(str(folder / "tokenizer.json"))


def print_crowd(crowd: Crowd, begun: Reading, ended: Reading) -> None:
    """One line."""
    cpu_s, wall_s, tokens, messages = (
        after - before for before, after in zip(begun, ended, strict=True)
    )
    door = f"{crowd.door}{', TLS' * crowd.tls}"
    print(
        f"{door}, {crowd.streams} streams, a step every {crowd.step_s * 1e3:g} ms: "
        f"{cpu_s / tokens * 1e6:6.1f} us of CPU a token, {tokens / messages:4.2f} tokens a "
        f"message, {tokens / wall_s:6.0f} tokens/s, {cpu_s / wall_s:4.0%} of a core",
        flush=True,
    )


def main() -> None:
    """Prints a line for each size, or for each run of the crowd."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384, help="of the one stream")
    parser.add_argument("--crowd", action="store_true")
    parser.add_argument("--door", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--step-ms", type=float, default=8)
    parser.add_argument("--seconds", type=float, default=5, help="measured of the crowd")
    parser.add_argument("--tls", action="store_true", help="of the crowd's door")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--as", dest="role", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        role, crowd, address = args.role
        be = {"worker": be_worker, "clients": be_clients}[role]
        asyncio.run(be(Crowd(*json.loads(crowd)), address))
    elif args.crowd:
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder))
            write_set(Path(folder), (), (), days=1)
            step_s = args.step_ms / 1e3
            crowd = Crowd(args.door, args.streams, step_s, args.seconds, folder, args.tls)
            for _ in range(args.runs):
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    print_crowd(crowd, *runner.run(run_crowd(crowd)))
    else:
        for per_message in (1, 4, 16):
            costs = (
                asyncio.run(microseconds_a_token(per_message, args.tokens))
                for _ in range(args.runs)
            )
            cost_us = sorted(costs)[args.runs // 2]
            print(f"{per_message:3d} tokens a message: {cost_us:6.1f} us of CPU a token")


if __name__ == "__main__":
    main()
