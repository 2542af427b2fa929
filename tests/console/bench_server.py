"""A gRPC server of known capacity, for tests: one queue, one server, a fixed time a request.

`max_tokens` of a request says what becomes of it where it is one of the numbers below.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Set
from concurrent.futures import Future

import grpc
import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from baton.grpc_options import server_options
from baton.inference.v1 import inference_pb2 as pb
from baton.inference.v1 import inference_pb2_grpc as pb_grpc

SHORT, DOUBLED, REFUSED, SILENT = 1001, 1002, 1003, 1004
MODEL = "known"
CONTEXT_TOKENS = 4096


class KnownServer(pb_grpc.InferenceServiceServicer):
    """Serves on a thread of its own; a context manager.

    Args:
        service_s: time of one request, before its first token.
        gap_s: between tokens; a request that is decoding holds up no other.
        refuses: prompts. Their requests find the queue full.
    """

    def __init__(
        self,
        service_s: float = 0.0,
        gap_s: float = 0.0,
        refuses: Set[tuple[int, ...]] = frozenset(),
    ) -> None:
        self._refuses = refuses
        self._service_s = service_s
        self._gap_s = gap_s
        self._free_s = 0.0
        self.prompts: list[tuple[int, ...]] = []
        self.authorizations: set[str | None] = set()
        self.connections: Counter[str] = Counter()
        """Requests, by the connection that they came on."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> KnownServer:
        self._thread.start()
        self._run(self._start()).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._run(self._server.stop(0)).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work) -> Future:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start(self) -> None:
        self._server = grpc.aio.server(options=server_options())
        pb_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def ListModels(self, request, context):
        self._note(context)
        model = pb.Model(name=MODEL, max_context_tokens=CONTEXT_TOKENS)
        return pb.ListModelsResponse(models=[model])

    async def StreamGenerate(self, request, context) -> AsyncIterator[pb.StreamGenerateResponse]:
        wanted = request.input.stop.max_tokens
        self.prompts.append(tuple(request.input.token_ids.ids))
        self.connections[context.peer()] += 1
        self._note(context)
        if wanted == REFUSED or self.prompts[-1] in self._refuses:
            await context.abort_with_status(rpc_status.to_status(_full()))
        if wanted == SILENT:
            await asyncio.sleep(60)
        self._free_s = max(self._free_s, time.monotonic()) + self._service_s
        await asyncio.sleep(self._free_s - time.monotonic())
        yield pb.StreamGenerateResponse(
            started=pb.GenerationStarted(generation_id="0" * 31 + "7", model=MODEL)
        )
        indices = {SHORT: [0], DOUBLED: [0, 1, 1]}.get(wanted, range(wanted))
        for index in indices:
            if index and self._gap_s:
                await asyncio.sleep(self._gap_s)
            delta = pb.TokenDelta(first_token_index=index, token_ids=[index + 10])
            yield pb.StreamGenerateResponse(delta=delta)
        usage = pb.Usage(output_tokens=len(indices))
        yield pb.StreamGenerateResponse(
            finished=pb.GenerationFinished(finish_reason=pb.FINISH_REASON_LENGTH, usage=usage)
        )

    def _note(self, context) -> None:
        self.authorizations.add(dict(context.invocation_metadata()).get("authorization"))


def _full() -> status_pb2.Status:
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="baton"))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    return status_pb2.Status(code=code, message="the queue is full", details=[detail])
