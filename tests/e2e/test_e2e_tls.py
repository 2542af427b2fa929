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

import psutil
import pytest
from cluster import Cluster, running
from nursery import fork
from tiny_models import write_tiny_model
from typer.testing import CliRunner

from baton.client.clients import AsyncClient
from baton.tls import holders_files
from console.cli import app
from serving.net.certificates import write_set

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
    with running(
        write_tiny_model(folder / "model"), folder / "logs", certs=str(certs), trace=True
    ) as made:
        yield made


def renew(certs: Path) -> None:
    write_set(certs, POOLS, (), days=1)


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
