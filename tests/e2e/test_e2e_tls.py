"""A cluster with TLS inside and outside: it answers, renews its certificates, lets nobody in."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
from certificate_kit import EXPIRED, written
from cluster import Cluster, make_cluster
from nursery import fork
from tiny_models import write_tiny_model
from typer.testing import CliRunner
from waiting import wait_until

from baton.client.clients import AsyncClient
from baton.tls import TlsFiles, holders_files
from baton.worker.v1 import worker_pb2, worker_pb2_grpc
from console.cli import app
from serving.net.certificates import write_set
from serving.net.internal_net import ROUTER_NAME, TlsNet, agent_name
from serving.net.refusals import Refusals
from serving.release import stamp

POOLS = ("prefill", "decode", "both")
TOKENS = 24


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    renew(folder)
    return folder


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, certs: Path) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tls")
    made = make_cluster(
        write_tiny_model(folder / "model"), folder / "logs", certs=str(certs), trace=True
    )
    made.start_all()
    yield made
    made.stop()


def renew(certs: Path) -> None:
    write_set(certs, POOLS, (), days=1)


def member(certs: Path, holder: str) -> TlsNet:
    return TlsNet(holders_files(str(certs), holder), Refusals())


def internal_address(cluster: Cluster) -> str:
    argv = list(cluster.plan.specs[0].argv)
    return argv[argv.index("--internal-listen") + 1]


def ask(cluster: Cluster) -> str:
    with cluster.client() as client:
        return client.generate(token_ids=list(range(7, 60)), max_tokens=8, temperature=0).trace_id


def test_requests_spans_and_the_command_line_go_over_tls(cluster: Cluster, certs: Path) -> None:
    trace_id = ask(cluster)
    ca = cluster.plan.tls.ca
    url = f"https://{cluster.plan.http_address}/v1/models"
    context = ssl.create_default_context(cafile=ca)
    with urllib.request.urlopen(url, timeout=10, context=context) as answer:
        assert json.load(answer)["data"]

    def command(*words: str) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == 0, done.output
        return done.output

    assert "model" in command("models", "--router", cluster.door, "--tls-ca", ca)
    worker = f"grpcs://{cluster.workers['decode-0']}"
    files = holders_files(str(certs), "decode")
    shown = ("--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key)
    assert "SERVING" in command("health", worker, *shown)
    assert "decode-0" in command("trace", trace_id, "--admin", cluster.plan.admin_address)


async def refused(net: TlsNet, address: str, server_name: str, call: Any) -> str:
    """The status with which a call ends."""
    async with net.open_aio(address, server_name) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call(channel)
    return failed.value.code().name


async def work(channel: grpc.aio.Channel) -> None:
    """What a router does."""
    call = worker_pb2_grpc.WorkerServiceStub(channel).Work(timeout=10)
    attach = stamp(worker_pb2.Attach(router_id="rogue"))
    await call.write(worker_pb2.WorkRequest(attach=attach))
    if await call.read() is grpc.aio.EOF:
        raise grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata())


def announcing(name: str) -> Any:
    """What a worker does, of the model that is served here."""
    epoch = 99
    model = worker_pb2.ModelInfo(name="model", path="/etc")
    endpoint = worker_pb2.KvEndpoint(agent_name=agent_name(name, epoch), transport="null")
    identity = worker_pb2.WorkerIdentity(
        worker_id=name, epoch=epoch, address="127.0.0.1:9", role=worker_pb2.WORKER_ROLE_BOTH,
        model=model, endpoint=endpoint,
    )  # fmt: skip

    async def call(channel: grpc.aio.Channel) -> None:
        request = worker_pb2.AnnounceRequest(worker=stamp(identity))
        await worker_pb2_grpc.RegistryServiceStub(channel).Announce(request, timeout=10)

    return call


class Unchecked(TlsNet):
    """Shows any certificate, which `TlsNet` would refuse to start with."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files

    def credentials(self) -> grpc.ChannelCredentials:
        return self._files.channel_credentials()


async def test_rogues_are_refused_named_and_counted(
    cluster: Cluster, certs: Path, tmp_path: Path
) -> None:
    internal, decode = internal_address(cluster), cluster.workers["decode-0"]
    other_ca = str(certs / "authority" / "ca.pem")
    strangers = {
        "foreign": written(tmp_path / "foreign", ("decode", "decode-*"), by="foreign"),
        "expired": written(tmp_path / "expired", ("decode", "decode-*"), **EXPIRED),
    }
    for stranger in strangers.values():  # neither joins, nor has work done
        net = Unchecked(stranger._replace(ca=other_ca))
        assert await refused(net, internal, ROUTER_NAME, announcing("decode-1")) == "UNAVAILABLE"
        assert await refused(net, decode, "decode", work) == "UNAVAILABLE"
        await asyncio.sleep(1.0)  # Of several at once some are not counted.
    # A worker with a worker's certificate may neither pose as another nor do a router's work.
    prefill = member(certs, "prefill")
    said = await refused(prefill, internal, ROUTER_NAME, announcing("decode-1"))
    assert said == "PERMISSION_DENIED"
    assert await refused(prefill, decode, "decode", work) == "PERMISSION_DENIED"
    async with grpc.aio.insecure_channel(internal) as channel:  # in clear
        with pytest.raises(grpc.aio.AioRpcError):
            await announcing("decode-1")(channel)

    def counted(name: str, cause: str) -> float:
        return cluster.metric("baton_peers_refused_total", name, cause=cause)

    await asyncio.to_thread(wait_until, lambda: counted("router", "handshake") >= 2)
    await asyncio.to_thread(wait_until, lambda: counted("decode-0", "handshake") >= 1)
    assert counted("router", "name") == 1
    assert counted("decode-0", "not_a_router") == 1
    logs = cluster.logged()
    for words in (
        "peer refused",
        "its certificate is not of that name, but of 127.0.0.1",
        "its certificate lacks baton://router",
        "no valid certificate was shown",
        "hosts=127.0.0.1",
    ):
        assert words in logs, f"{words!r} is not in\n{cluster.tail(60)}"
    assert cluster.metric("baton_worker_up") == 2
    ask(cluster)


def test_every_process_listens_on_loopback_alone(cluster: Cluster) -> None:
    """The data plane, too, which listens on every interface by itself."""
    for name, process in cluster.processes.items():
        listening = [
            one.laddr.ip
            for one in psutil.Process(process.pid).net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        ]
        assert listening, name
        assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, (name, listening)


async def test_certificates_are_renewed_under_load_without_a_failed_request(
    cluster: Cluster, certs: Path
) -> None:
    """Old ones are not in use any more: workers find a router that was started since."""
    over, answered, failed = asyncio.Event(), [], []

    async def stream() -> None:
        while not over.is_set():
            try:
                async with AsyncClient(cluster.door, tls_ca=cluster.plan.tls.ca) as client:
                    result = await client.generate(
                        token_ids=list(range(9, 40)), max_tokens=TOKENS, ignore_eos=True
                    )
                answered.append(len(result.token_ids))
                await asyncio.sleep(0.1)
            except Exception as error:
                failed.append(repr(error))

    asking = [asyncio.create_task(stream()) for _ in range(2)]
    for _ in range(2):
        await asyncio.to_thread(renew, certs)
        await asyncio.sleep(3.0)
    over.set()
    await asyncio.gather(*asking)
    assert failed == []
    assert set(answered) == {TOKENS}
    assert len(answered) > 4
    replaced = re.findall(r"certificate replaced", cluster.logged())
    assert len(replaced) >= 2 * 3, cluster.tail()  # a router's two are one file
    await asyncio.to_thread(cluster.kill, "decode-0")  # and the new one joins
    cluster.start("decode-0")
    await asyncio.to_thread(cluster.wait_ready)
    await asyncio.to_thread(ask, cluster)


def test_a_worker_with_another_name_does_not_start(
    cluster: Cluster, certs: Path, tmp_path: Path
) -> None:
    files = holders_files(str(certs), "decode")
    model = next(word for word in cluster.plan.specs[-1].argv if word.endswith("/model"))
    argv = [
        *(sys.executable, "-m", "baton", "worker", "--model", model, "--name", "prefill-9"),
        *("--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key),
        *("--admin", "127.0.0.1:0"),
    ]
    assert fork(argv, os.environ, tmp_path / "log").wait(100) == 1
    assert "is not of prefill-9, but of decode, decode-*" in (tmp_path / "log").read_text()
