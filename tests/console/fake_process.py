"""A process that calls itself healthy, run by test_up: `fake_process.py HOST:PORT`."""

import signal
import sys
import threading
from concurrent import futures

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.grpc_options import server_options


def main(address: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = grpc.server(futures.ThreadPoolExecutor(2), options=server_options())
    healthy = health.HealthServicer()
    healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    server.add_insecure_port(address)
    server.start()
    print("serving", flush=True)
    stop.wait()
    server.stop(0).wait()
    print("drained", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
