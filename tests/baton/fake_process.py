"""A process that is healthy and knows a model, run by test_up: `fake_process.py HOST:PORT`."""

import signal
import sys
import threading
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.inference.v1 import inference_pb2 as pb
from baton.inference.v1 import inference_pb2_grpc as pb_grpc


class Router(pb_grpc.InferenceServiceServicer):
    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="tiny")])


def main(address: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = grpc.server(futures.ThreadPoolExecutor(2))
    healthy = health.HealthServicer()
    healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    pb_grpc.add_InferenceServiceServicer_to_server(Router(), server)
    server.add_insecure_port(address)
    server.start()
    print("serving", flush=True)
    stop.wait()
    server.stop(0).wait()
    print("drained", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
