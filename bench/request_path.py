"""What the Python of a router does for a request, without gRPC's part and the kernel's.

    python -m bench.request_path [--door grpc|http] [--chat] [--callbacks | --calls]

One process: a router's own parts, from the bytes of a request at its door to the last message, with
links to a prefill and a decode worker that answer at once. Requests of `--prompt` ids, or
conversations of about that length, get 8 tokens, each in a message of its own, one request after
the other. It prints the CPU time of the loop's thread for a request, or of its longest callback of
each kind (`--callbacks`; the loop is asyncio's own then): the 2nd percentile, the median and the
90th of all requests, since other processes of a machine only add to them.

`--calls` counts calls of functions instead, Python's and C's, by what they are called from. They
are the same in each run, however busy the machine is, and so show what a change takes away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, Self, cast

import tokenizers
from uvicorn.server import ServerState

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from bench.crowd import ANY, CORPUS, Crowd, StandInWorker, turn_of, write_tokenizer
from bench.parts import name_of
from router.doors.frontdoor import SERVICE_NAME, InferenceService
from router.server import RouterServer
from router.settings import RouterSettings
from serving import garbage
from serving.event_loop import loop_factory, prepare_to_serve
from serving.wire import pack_ids
from telemetry.rpc import ServerSpans

OUTPUT_TOKENS = 8
STEP_S = 2e-4
WARM_UP = 30
PLACE = bytes(16)
"""Stands for an attempt's id in the messages of a worker."""
Ask = Callable[[], Awaitable[None]]


class Worker:
    """A worker and its stream. Its messages are made beforehand, and are bytes for the router."""

    def __init__(self, crowd: Crowd, role: worker_pb2.WorkerRole.ValueType) -> None:
        self.identity = StandInWorker(crowd, 1, role).identity
        self.identity.model.prefix_cache = True
        self._decodes = role == worker_pb2.WORKER_ROLE_DECODE
        self.peer = self
        self._sent: asyncio.Queue[bytes] = asyncio.Queue()
        backend = tokenizers.Tokenizer.from_file(f"{crowd.folder}/tokenizer.json")
        self._script = _script(backend.encode(CORPUS.read_text(encoding="utf-8")).ids)
        attached = worker_pb2.Attached(worker=self.identity)
        self._sent.put_nowait(worker_pb2.WorkResponse(attached=attached).SerializeToString())
        self._beat(1)

    def stream_stream(self, *_: Any, **__: Any) -> Callable[[], Self]:
        """Is its own channel."""
        return lambda: self

    @asynccontextmanager
    async def open_aio(self, *_: Any) -> AsyncIterator[Self]:
        """Is the net that leads to it."""
        yield self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> worker_pb2.WorkResponse:
        return worker_pb2.WorkResponse.FromString(await self._sent.get())

    async def write(self, message: worker_pb2.WorkRequest) -> None:
        """The router sends a message. Then others have a turn, as behind gRPC's write."""
        message.SerializeToString()
        if message.HasField("submit") and self._decodes:
            self._send(message.submit.attempt_id, [self._script["granted"]])
        elif message.HasField("grant"):
            attempt_id = message.grant.attempt_id
            self._send(attempt_id, [self._script["first"], self._script["done"]])
            rest = [one for name, one in self._script.items() if name[0].isdigit()]
            self.peer._send(attempt_id, rest, 3 * STEP_S)
        await asyncio.sleep(0)

    def cancel(self) -> None:
        """The router lets go of it."""

    def _send(self, attempt_id: bytes, messages: Sequence[bytes], after_s: float = STEP_S) -> None:
        """Sends messages, one each step."""

        def send() -> None:
            self._sent.put_nowait(messages[0].replace(PLACE, attempt_id))
            if messages[1:]:
                self._send(attempt_id, messages[1:])

        asyncio.get_running_loop().call_later(after_s, send)

    def _beat(self, progress: int) -> None:
        load = worker_pb2.Load(progress=progress, max_sequences=1 << 12)
        load.total_pages = load.free_pages = load.prefill_credit_tokens = 1 << 20
        self._sent.put_nowait(worker_pb2.WorkResponse(load=load).SerializeToString())
        asyncio.get_running_loop().call_later(1.0, self._beat, progress + 1)


def _script(text: Sequence[int]) -> dict[str, bytes]:
    """Messages about an attempt, in their order. The decode worker's have numbers."""
    grant = worker_pb2.Grant(attempt_id=PLACE, transfer_id=PLACE, page_ids=pack_ids(range(1, 66)))
    first = worker_pb2.FirstToken(attempt_id=PLACE)
    first.records.add(token_id=text[0])
    tokens = [
        worker_pb2.Tokens(
            attempt_ids=[PLACE],
            choice_indices=bytes(4),
            indices=pack_ids([index]),
            token_ids=pack_ids([text[index]]),
        )
        for index in range(OUTPUT_TOKENS)
    ]
    end = worker_pb2.Finished(
        attempt_id=PLACE, reason=worker_pb2.END_REASON_LENGTH, output_tokens=OUTPUT_TOKENS
    )
    made = {
        "granted": worker_pb2.WorkResponse(granted=grant),
        "first": worker_pb2.WorkResponse(first_token=first),
        "done": worker_pb2.WorkResponse(prefill_done=worker_pb2.PrefillDone(attempt_id=PLACE)),
        "0": worker_pb2.WorkResponse(delivered=worker_pb2.Delivered(attempt_id=PLACE)),
        **{f"1{n}": worker_pb2.WorkResponse(tokens=one) for n, one in enumerate(tokens)},
        "2": worker_pb2.WorkResponse(finished=end),
    }
    return {name: message.SerializeToString() for name, message in made.items()}


class _GrpcCall(SimpleNamespace):
    """A call as gRPC hands it to a handler; nobody reads it."""

    invocation_metadata = staticmethod(lambda: (("user-agent", "bench"),))
    peer = staticmethod(lambda: "ipv4:127.0.0.1:5")
    time_remaining = code = staticmethod(lambda: None)

    async def write(self, message: api.StreamGenerateResponse) -> None:
        message.SerializeToString()
        await asyncio.sleep(0)


def _over_grpc(server: RouterServer, prompt: dict[str, Any]) -> Ask:
    """Asks the handler of StreamGenerate, behind its interceptor."""
    found: list[Any] = []
    mounted = SimpleNamespace(add_generic_rpc_handlers=found.extend)
    service = InferenceService(
        server.dispatcher, server._tokenizers, server._limits, server.metrics, server._gate
    )
    service.add_to_server(cast("Any", mounted))
    wanted = api.GenerationInput(**prompt)
    wanted.stop.CopyFrom(api.StopOptions(max_tokens=OUTPUT_TOKENS, ignore_eos=True))
    data = api.StreamGenerateRequest(input=wanted).SerializeToString()
    details: Any = SimpleNamespace(
        method=f"/{SERVICE_NAME}/StreamGenerate",
        invocation_metadata=_GrpcCall.invocation_metadata(),
    )

    async def handler(details: Any) -> Any:
        return found[0].service(details)

    async def ask() -> None:
        taken: Any = await ServerSpans().intercept_service(handler, details)
        await taken.unary_stream(taken.request_deserializer(data), _GrpcCall())

    return lambda: asyncio.create_task(ask())


class _Socket(asyncio.Transport):
    """A connection's transport; nobody reads it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)})
        self.closed = asyncio.get_running_loop().create_future()

    def write(self, data: Any) -> None:
        self.last = data

    def is_closing(self) -> bool:
        return self.closed.done()

    def close(self) -> None:
        if not self.is_closing():
            self.closed.set_result(None)

    get_write_buffer_size = staticmethod(lambda: 0)
    pause_reading = resume_reading = lambda _: None


def _over_http(server: RouterServer, path: str, prompt: dict[str, Any]) -> Ask:
    """Asks the HTTP port's protocol, on a connection of its own."""
    config, state = server._http._server.config, ServerState()
    config.load()
    asked = {"model": "bench", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
    body = json.dumps({**asked, **prompt}).encode()
    data = (
        f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body

    async def ask() -> None:
        protocol: Any = config.http(config=config, server_state=state, app_state={})  # type: ignore
        socket = _Socket()
        protocol.connection_made(socket)
        protocol.data_received(data)
        await socket.closed
        protocol.connection_lost(None)
        assert socket.last.endswith(b"0\r\n\r\n"), socket.last

    return ask


def _door(args: argparse.Namespace, server: RouterServer) -> Ask:
    turn = turn_of(args.prompt)
    if args.door == "grpc":
        message = api.ChatMessage(role=api.ROLE_USER, content=turn)
        chat: dict[str, Any] = {"chat": api.ChatPrompt(messages=[message])}
        ids: dict[str, Any] = {"token_ids": api.TokenIds(ids=[7] * args.prompt)}
        return _over_grpc(server, chat if args.chat else ids)
    if args.chat:
        messages = [{"role": "user", "content": turn}]
        return _over_http(server, "chat/completions", {"messages": messages})
    return _over_http(server, "completions", {"prompt": [7] * args.prompt})


async def measure(args: argparse.Namespace, folder: str) -> None:
    """Prints the figures."""
    crowd = Crowd(args.door, 1, 0.0, folder, prompt_tokens=args.prompt, chat=args.chat)
    server = RouterServer(RouterSettings(listen=ANY, internal_listen=ANY, http_listen=ANY))
    workers = [Worker(crowd, role) for role in crowd.roles]
    for worker, peer in zip(workers, reversed(workers), strict=True):
        worker.peer, server.registry.net = peer, cast("Any", worker)
        server.registry.announce(worker.identity)
        await asyncio.sleep(0.1)
    await server._tokenizers.warm(server.dispatcher.models())
    ask = _door(args, server)
    for _ in range(WARM_UP):
        await ask()
    garbage.set_apart()
    if args.calls:
        await _count(ask, args.requests)
    else:
        await _time(ask, args.requests, callbacks=args.callbacks)


async def _time(ask: Ask, requests: int, *, callbacks: bool) -> None:
    cpu_s: list[float] = []
    longest: defaultdict[str, list[float]] = defaultdict(list)
    now: defaultdict[str, float] = defaultdict(float)
    inner = asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        named, began_s = name_of(handle), time.thread_time()
        inner(handle)
        now[named] = max(now[named], time.thread_time() - began_s)

    if callbacks:
        asyncio.events.Handle._run = timed  # type: ignore[method-assign, assignment]
    for _ in range(requests):
        now.clear()
        began_s = time.thread_time()
        await ask()
        cpu_s.append(time.thread_time() - began_s)
        for named, took_s in now.items():
            longest[named].append(took_s)
    print(f"a request: {_spread(cpu_s)}")
    for named, took in sorted(longest.items(), key=lambda one: -min(one[1]))[:4]:
        print(f"    longest of {named:45} {_spread(took)}")


def _spread(seconds: list[float]) -> str:
    us = [1e6 * one for one in sorted(seconds)]
    at = [us[len(us) * share // 100] for share in (2, 50, 90)]
    return "CPU {:.0f}, {:.0f} and {:.0f} us".format(*at)


async def _count(ask: Ask, requests: int) -> None:
    calls: Counter[CodeType] = Counter()
    stack: list[tuple[CodeType, int]] = []
    total = 0

    def hook(frame: FrameType, event: str, _: object) -> None:
        nonlocal total
        total += event in ("call", "c_call")
        if event == "call":
            stack.append((frame.f_code, total - 1))
        elif event == "return" and stack and stack[-1][0] is frame.f_code:
            code, before = stack.pop()
            calls[code] += total - before

    sys.setprofile(hook)
    for _ in range(requests):
        await ask()
    sys.setprofile(None)
    print(f"a request: {total / requests:.0f} calls")
    for code, count in calls.most_common(120):
        name = code.co_filename.removeprefix(f"{os.getcwd()}/")
        if name.startswith(("router", "prefixes", "telemetry")):
            print(f"    {count / requests:7.1f} {code.co_qualname} ({name})")


def main() -> None:
    """Prints what a request takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--door", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--chat", action="store_true", help="requests are conversations")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--requests", type=int, default=400)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--callbacks", action="store_true", help="how long the loop's take")
    kinds.add_argument("--calls", action="store_true", help="count calls of functions")
    args = parser.parse_args()
    logging.disable()
    prepare_to_serve()
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        with asyncio.Runner(loop_factory=None if args.callbacks else loop_factory()) as runner:
            runner.run(measure(args, folder))
            sys.stdout.flush()
            os._exit(0)  # Links and threads would take a while to end.


if __name__ == "__main__":
    main()
