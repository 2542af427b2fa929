"""An endpoint that calls `InferenceService/StreamGenerate` with serialized messages.

Requests and checks are those of `baton.client`. Requests are written before the run, and answers
are read after it.
"""

from __future__ import annotations

import time
from typing import Final

import grpc
import grpc.aio

from baton.client.channels import open_aio_channel
from baton.client.generation import Gathering
from baton.client.options import Options
from baton.client.requests import generation_input
from baton.errors import ProtocolError, UnreachableError, from_rpc_error
from baton.grpc_options import channel_options
from baton.inference.v1 import inference_pb2 as pb
from console.loadgen.endpoints import Asked, EndpointError, Kept, Reading, timed_out
from console.loadgen.outcome import UNREACHABLE

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["InferenceService"]
_METHOD: Final = f"/{_SERVICE.full_name}/{_SERVICE.methods_by_name['StreamGenerate'].name}"


class GrpcEndpoint:
    """The gRPC API of a router."""

    def __init__(self, address: str, asked: Asked) -> None:
        self._asked = asked
        self._channel = open_aio_channel(address, channel_options(), asked.files)
        self._metadata = [("authorization", f"Bearer {asked.api_key}")] if asked.api_key else []
        self._call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
        self._call = self._channel.unary_stream(_METHOD)

    def write(self, prompt: list[int], output_tokens: int) -> bytes:
        """Returns a request, serialized."""
        options = Options(model=self._asked.model, max_tokens=output_tokens, temperature=0.0)
        if self._asked.force_length:
            options["min_tokens"] = output_tokens
            options["ignore_eos"] = True
        request = generation_input(None, None, prompt, options)
        return pb.StreamGenerateRequest(input=request).SerializeToString()

    async def send(self, request: bytes, kept: Kept) -> None:
        """Sends a request and keeps its answer unread."""
        at_s, parts, now = kept.at_s, kept.parts, time.perf_counter
        try:
            async for part in self._call(
                request, timeout=self._asked.timeout_s, metadata=self._metadata
            ):
                at_s.append(now())
                parts.append(part)
        except grpc.aio.AioRpcError as failed:
            raise self._error(failed) from None

    def _error(self, failed: grpc.aio.AioRpcError) -> EndpointError:
        error = from_rpc_error(failed)
        if isinstance(error, UnreachableError):
            return EndpointError(UNREACHABLE, error.message)
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.reason:
            return timed_out(self._asked.timeout_s)
        return EndpointError(error.reason or error.code.name, error.message)

    def read(self, kept: Kept) -> Reading:
        """Reads an answer. Counts the tokens before the first one that is out of order."""
        gathering = Gathering()
        arrivals_s: list[float] = []
        tokens = 0
        try:
            for at_s, part in zip(kept.at_s, kept.parts, strict=True):
                delta = gathering.add(pb.StreamGenerateResponse.FromString(part))
                if delta is not None and delta.token_ids:
                    arrivals_s.append(at_s)
                    tokens += len(delta.token_ids)
            found = gathering.result()
        except ProtocolError:
            return Reading(arrivals_s, tokens, gathering.trace_id, whole=False)
        cached, loaded = found.usage.cached_prompt_tokens, found.usage.loaded_prompt_tokens
        return Reading(
            *(arrivals_s, tokens, gathering.trace_id, True),
            *(found.token_ids, cached, loaded),
        )

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()
