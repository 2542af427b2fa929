"""The composed process: joined over its internal port, asked over its public one, drained."""

from __future__ import annotations

import asyncio
import urllib.request
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from operators import post_status
from router_kit import a_router, served
from scripted_worker import PREFILL, WAIT_S, until

from baton.grpc_options import channel_options
from baton.inference.v1 import inference_pb2, inference_pb2_grpc
from router.doors.frontdoor import SERVICE_NAME
from router.requests.tokenization import Tokenizer
from serving.grpc_services import REFLECTION_V1


def request(max_tokens: int = 2) -> inference_pb2.StreamGenerateRequest:
    return inference_pb2.StreamGenerateRequest(
        input=inference_pb2.GenerationInput(
            token_ids=inference_pb2.TokenIds(ids=[1, 2, 3]),
            stop=inference_pb2.StopOptions(max_tokens=max_tokens),
            output=inference_pb2.OutputOptions(omit_text=True),
        )
    )


async def health_of(channel: grpc.aio.Channel, service: str) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_a_request_through_both_ports() -> None:
    async with (
        served() as (server, worker),
        grpc.aio.insecure_channel(server.address, options=channel_options()) as channel,
    ):
        call = inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request())
        submit = await worker.heard("submit")
        worker.first_token(submit.attempt_id, 10)
        worker.tokens(submit.attempt_id, 1, 11)
        worker.finished(submit.attempt_id, 2)
        events = [event async for event in call]
        assert [event.WhichOneof("event") for event in events] == [
            "started",
            *["delta"] * (len(events) - 2),
            "finished",
        ]
        assert [i for event in events for i in event.delta.token_ids] == [10, 11]
        assert server.dispatcher.active_jobs == 0


async def test_a_request_through_the_fast_door(caplog: pytest.LogCaptureFixture) -> None:
    """One trace, one line of the access log, and the metrics of both doors; then it drains."""
    caplog.set_level("INFO", "baton.access")
    trace = "0af7651916cd43dd8448eb211c80319c"
    parent = (("traceparent", f"00-{trace}-b7ad6b7169203331-01"),)
    async with served(fast_listen="127.0.0.1:0") as (server, worker):
        door = server.fast_door
        assert door is not None
        assert door.address not in ("", server.address)
        async with grpc.aio.insecure_channel(door.address, options=channel_options()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.StreamGenerate(request(), metadata=parent)
            submit = await worker.heard("submit")
            assert trace in submit.traceparent
            value = server.metrics.registry.get_sample_value
            assert value("baton_fast_door_calls") == 1
            assert value("baton_fast_door_connections") == 1
            worker.first_token(submit.attempt_id, 10)
            worker.tokens(submit.attempt_id, 1, 11)
            worker.finished(submit.attempt_id, 2)
            events = [event async for event in call]
            assert [i for event in events for i in event.delta.token_ids] == [10, 11]
            assert events[0].started.generation_id == trace
        (line,) = [vars(one) for one in caplog.records if one.name == "baton.access"]
        assert (line["trace_id"], line["status"], line["output_tokens"]) == (trace, "OK", 2)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*door.address.split(":"))


async def test_health_follows_the_workers() -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with served() as (server, worker), grpc.aio.insecure_channel(server.address) as channel:
        assert await health_of(channel, "") == serving
        await until_serving(channel)
        listed = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        assert {name: one.status for name, one in listed.statuses.items()} == {
            "": serving,
            SERVICE_NAME: serving,
        }
        await worker.stop()
        await until_serving(channel, is_true=False)
        assert await health_of(channel, "") == serving
        assert not server.dispatcher.models()


async def until_serving(channel: grpc.aio.Channel, *, is_true: bool = True) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    async with asyncio.timeout(WAIT_S):
        while (await health_of(channel, SERVICE_NAME) == serving) is not is_true:
            await asyncio.sleep(0.01)


async def test_no_request_waits_for_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read from the first worker on, and before health says that the model can be run."""
    reads: list[str] = []
    monkeypatch.setattr(Tokenizer, "load", lambda folder, template: reads.append(folder))
    async with served(PREFILL):
        await until(lambda: reads)
    assert reads == ["/tiny"]
    async with served() as (server, worker), grpc.aio.insecure_channel(server.address) as channel:
        await until_serving(channel)
        assert reads == ["/tiny"] * 2
        inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request())
        await worker.heard("submit")
        assert reads == ["/tiny"] * 2


async def test_commands_of_an_operator_come_in_at_the_admin_port() -> None:
    async with a_router(operator_token="secret") as server:
        assert await post_status(server.admin.address, "") == 403
        assert await post_status(server.admin.address, "Bearer secret") == 405


async def test_metrics_on_both_http_ports() -> None:
    async with served() as (server, worker), grpc.aio.insecure_channel(server.address) as channel:
        inference_pb2_grpc.InferenceServiceStub(channel).StreamGenerate(request())
        await worker.heard("submit")
        for address in (server.admin.address, server.http_address):
            page = await asyncio.to_thread(_read, f"http://{address}/metrics")
            assert "\nbaton_requests_inflight 1.0\n" in page
            assert "\nbaton_queue_wait_seconds_count 1.0\n" in page
            assert '\nbaton_worker_up{model="tiny",role="both",worker="b0"} 1.0\n' in page


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=WAIT_S) as page:
        return str(page.read(), "utf-8")


async def test_reflection_v1_names_the_services() -> None:
    async with served() as (server, _), grpc.aio.insecure_channel(server.address) as channel:
        ask = channel.stream_stream(
            f"/{REFLECTION_V1}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="*")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE_NAME, REFLECTION_V1, "grpc.health.v1.Health"} <= names
        for name in names:  # as `buf curl --list-methods` does
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
            answer = await ask(iter([asked])).read()
            assert answer.file_descriptor_response.file_descriptor_proto, name
