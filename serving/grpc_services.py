"""Adds the services that every gRPC server of Baton offers: health and reflection."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"


async def add_health_and_reflection(
    server: grpc.aio.Server, service_names: Sequence[str], *, reflection: bool = True
) -> health.aio.HealthServicer:
    """Adds `grpc.health.v1`, and reflection of it and of the named services if it is wanted.

    Health starts as SERVING for the process ("") and as NOT_SERVING for each service. The returned
    servicer changes it.
    """
    servicer = _Health()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    for name in service_names:
        await servicer.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    if reflection:
        _add_reflection(server, (*service_names, health.SERVICE_NAME))
    return servicer


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # It is untyped.
    """Adds `List`, which the library lacks. A call of it would log an error."""

    async def List(  # noqa: N802 - gRPC's name
        self, request: health_pb2.HealthListRequest, context: object
    ) -> health_pb2.HealthListResponse:
        """Returns every service and its status."""
        response = health_pb2.HealthListResponse()
        for name, status in self._server_status.items():
            response.statuses[name].status = status
        return response


def _describe_v1() -> None:
    """Makes v1 of the reflection service known, which the library lacks: clients that list all
    services ask for its description, too."""
    pool = descriptor_pool.Default()
    with suppress(KeyError):
        pool.FindServiceByName(REFLECTION_V1)
        return
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    v1 = text_format.MessageToString(file).replace("v1alpha", "v1")
    pool.Add(text_format.Parse(v1, descriptor_pb2.FileDescriptorProto()))


def _add_reflection(server: grpc.aio.Server, service_names: tuple[str, ...]) -> None:
    """Adds reflection under v1 and v1alpha, which have the same messages on the wire."""
    _describe_v1()
    names = (*service_names, reflection.SERVICE_NAME, REFLECTION_V1)
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, methods),))
