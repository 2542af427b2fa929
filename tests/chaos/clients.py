"""Clients that write down everything that comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from baton.client.channels import open_aio_channel
from baton.client.requests import generation_input
from baton.errors import BatonError, UnreachableError, from_rpc_error
from baton.grpc_options import client_options
from baton.inference.v1 import inference_pb2 as pb
from baton.inference.v1 import inference_pb2_grpc as pb_grpc
from baton.tls import NO_FILES, TlsFiles
from chaos.checker import GRACE_S, UNREACHABLE
from chaos.history import Ask, Event, History

STALL_S = 1.0
LOOK_S = 0.05
OVERDUE_S = 10.0
"""A call that did not end by deadline and grace gets so much longer, and is then given up."""

Call = grpc.aio.UnaryStreamCall[pb.StreamGenerateRequest, pb.StreamGenerateResponse]


async def ask_all(address: str, asks: Sequence[Ask], files: TlsFiles = NO_FILES) -> list[History]:
    """Sends every ask at its time and returns when all have ended, or are given up."""
    async with open_aio_channel(address, client_options(retries=False), files) as channel:
        stub: pb_grpc.InferenceServiceAsyncStub = pb_grpc.InferenceServiceStub(channel)
        still = _StandStill()
        watching = asyncio.create_task(still.watch())
        histories = await asyncio.gather(*(_ask_later(stub, ask) for ask in asks))
        watching.cancel()
        for history in histories:
            history.blind_s += still.seconds
        return histories


class _StandStill:
    """How long these clients themselves did not run, though they were due: nothing that comes
    meanwhile is seen before they do."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        while True:
            slept = time.monotonic()
            await asyncio.sleep(LOOK_S)
            late_s = time.monotonic() - slept - LOOK_S
            self.seconds += late_s if late_s > LOOK_S else 0.0


async def _ask_later(stub: pb_grpc.InferenceServiceAsyncStub, ask: Ask) -> History:
    await asyncio.sleep(ask.start_s)
    history = History(ask, time.monotonic())
    call: Call = stub.StreamGenerate(_request(ask), timeout=ask.timeout_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ask.timeout_s + GRACE_S + OVERDUE_S):
            await _read(call, history)
    call.cancel()
    return history


async def _read(call: Call, history: History) -> None:
    try:
        deltas = 0
        async for message in call:
            event = _event(message)
            history.events.append(event)
            deltas += event.kind == "delta"
            if event.kind == "delta" and deltas == history.ask.after_deltas:
                await _behave(call, history)
    except grpc.RpcError as error:
        history.events.append(_failed(from_rpc_error(error)))
    except asyncio.CancelledError:
        if history.cancelled_s is None:
            raise  # this task was cancelled, and not the call
        history.events.append(Event("status", time.monotonic(), code="CANCELLED"))
    else:
        code = await call.code()
        history.events.append(Event("status", time.monotonic(), code=code.name))


async def _behave(call: Call, history: History) -> None:
    match history.ask.behaviour:
        case "cancel":
            history.cancelled_s = time.monotonic()
            call.cancel()
        case "stall":
            await asyncio.sleep(STALL_S)
            history.blind_s += STALL_S


def _request(ask: Ask) -> pb.StreamGenerateRequest:
    option, text = ask.form
    form: Any = {option: text} if option else {}
    given = generation_input(
        None,
        None,
        ask.prompt,
        {
            "max_tokens": ask.max_tokens,
            "choices": ask.choices,
            "temperature": ask.temperature,
            "seed": ask.seed,
            "frequency_penalty": ask.frequency_penalty,
            "ignore_eos": ask.ignore_eos,
            **form,
        },
    )
    return pb.StreamGenerateRequest(input=given, client_tag=f"chaos-{ask.number}")


def _event(message: pb.StreamGenerateResponse) -> Event:
    now_s = time.monotonic()
    match message.WhichOneof("event"):
        case "started":
            return Event("started", now_s, trace_id=message.started.generation_id)
        case "delta":
            delta = message.delta
            ids = tuple(delta.token_ids)
            return Event("delta", now_s, delta.choice_index, delta.first_token_index, ids)
        case "finished":
            ended = message.finished
            reason = pb.FinishReason.Name(ended.finish_reason).removeprefix("FINISH_REASON_")
            tokens = ended.usage.output_tokens if ended.HasField("usage") else None
            return Event(
                "finished",
                now_s,
                ended.choice_index,
                finish_reason=reason,
                output_tokens=tokens,
            )
        case other:
            raise AssertionError(f"an event of kind {other}")


def _failed(error: BatonError) -> Event:
    reason = UNREACHABLE if isinstance(error, UnreachableError) else error.reason
    if not reason and error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        reason = "DEADLINE_EXCEEDED"  # the client's own clock was faster
    sent = error.metadata.get("tokens_sent")
    return Event(
        "status",
        time.monotonic(),
        trace_id=error.trace_id,
        code=error.code.name,
        reason=reason,
        tokens_sent=int(sent) if sent is not None else None,
    )
