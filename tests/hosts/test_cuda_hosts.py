"""GPUs of several hosts: two nodes on one machine, of which each sees a GPU of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from hosts_kit import baton
from references import references
from settings_kit import variables_of
from tiny_models import write_tiny_model

from baton.client.clients import Client
from baton.errors import BatonError
from serving.net.certificates import write_set
from worker.hosts.interfaces import addresses

pytestmark = pytest.mark.gpu
START_S = 200.0
SAYING = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
"""NCCL says by which way ranks reach each other."""


def free_port(host: str) -> int:
    with socket.create_server((host, 0)) as door:
        return int(door.getsockname()[1])


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (1, 2)])
def test_the_tokens_are_those_of_one_process(pp: int, tp: int, tmp_path: Path) -> None:
    """By NCCL over the fabric: no memory is shared over hosts, and NCCL takes each node for one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("it needs two GPUs")
    here = next(str(one) for one in addresses() if not one.is_loopback and one.version == 4)
    model = write_tiny_model(tmp_path / "model", layers=4, heads=4, kv_heads=2)
    write_set(tmp_path / "certs", ("both",), (), days=30)
    internal, door = (f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
    shared = {
        "name": "both-0",
        "role": "both",
        "model": model,
        "dtype": "float32",
        "device": "cuda",
        "pp": pp,
        "tp": tp,
        "nodes": 2,
        "leader": f"{here}:{free_port(here)}",
        "fabric": f"trusted:{here}/32",
        "num_pages": 400,
        "transport": "loopback",  # Nobody hands pages over here, and not every machine has NIXL.
        "routers": internal,
        "admin": "127.0.0.1:0",
        "tls_dir": tmp_path / "certs/both",
    }
    router = {
        "listen": door,
        "http_listen": f"127.0.0.1:{free_port('127.0.0.1')}",
        "internal_listen": internal,
        "admin": "127.0.0.1:0",
        "tls_dir": tmp_path / "certs/router",
    }
    started = [("router", router, {})] + [
        (
            "worker",
            {**shared, "node": node},
            {"CUDA_VISIBLE_DEVICES": str(node), "NCCL_HOSTID": f"node-{node}"} | SAYING,
        )
        for node in range(2)
    ]
    log = (tmp_path / "log").open("wb")
    processes = [
        subprocess.Popen(
            baton(command),
            env={**os.environ, **variables_of(settings), **own},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for command, settings, own in started
    ]
    try:
        with Client(door, retries=False) as client:
            answer_in_time(client, processes, tmp_path / "log")
            references(model).check_client(client)
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(60) for process in processes]
    said = (tmp_path / "log").read_text()
    assert codes == [0, 0, 0], said
    assert "via NET/Socket" in said, said


def answer_in_time(client: Client, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Until the worker answers."""
    ends_s = time.monotonic() + START_S
    while True:
        try:
            client.generate(token_ids=[1, 2, 3], max_tokens=1)
            return
        except BatonError:
            ended = [process.args for process in processes if process.poll() is not None]
            assert not ended, log.read_text()
            assert time.monotonic() < ends_s, log.read_text()
            time.sleep(1)
