"""Stores over real servers: Mooncake's master, and S3 by the example package."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import debian
import pytest
from engine_kit import running
from test_stores import A, B, Ends
from test_stores_groups import COUNT, ROUNDS
from test_stores_groups import MODELS as GROUPED
from test_stores_groups import SMALL as TIGHT
from test_tiers_engine import talk
from test_tiers_stores import SMALL, conversations, path, speaks, want  # noqa: F401
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.config import EngineConfig
from engine.engine import Engine, EngineError
from engine.tiers.stores.messages import LOAD, LOOKUP, STORE

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv-store-s3"


def free_ports(count: int) -> list[int]:
    """Below those for which weed adds 10,000 for gRPC."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3 * count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return [port for port in ports if port < 55000][:count]


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory):
    """The address of a store whose memory is the worker's own child's."""
    debian.libraries()
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        debian.give_up(f"mooncake: {error}")
    rpc, metrics = free_ports(2)
    argv = [debian.program("mooncake_master"), f"-rpc_port={rpc}", f"-metrics_port={metrics}"]
    log = (tmp_path_factory.mktemp("mooncake") / "log").open("wb")
    master = subprocess.Popen([*argv, "-rpc_address=127.0.0.1"], stdout=log, stderr=log)
    try:
        wait_until(lambda: listens(rpc))
        yield f"mooncake://127.0.0.1:{rpc}?gib=0.25&local=127.0.0.1"
    finally:
        master.kill()
        master.wait()


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """The address of a bucket on a server of this machine, by the example, installed apart."""
    pytest.importorskip("obstore")
    folder = tmp_path_factory.mktemp("weed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    source = shutil.copytree(EXAMPLE, folder / "source")
    subprocess.run([*pip, "--target", str(folder / "site"), str(source)], check=True)
    master, volume, filer, s3 = free_ports(4)
    argv = [debian.program("weed"), "server", "-s3", "-ip=127.0.0.1", f"-dir={folder}"]
    ports = [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
    log = (folder / "log").open("wb")
    small = ["-volume.max=20", "-master.volumeSizeLimitMB=64"]
    small += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
    server = subprocess.Popen([*argv, *ports, *small, f"-s3.port={s3}"], stdout=log, stderr=log)
    try:
        with pytest.MonkeyPatch.context() as patch:
            paths = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
            patch.syspath_prepend(paths[0])  # An engine here looks whether there is such a store.
            patch.setenv("AWS_SKIP_SIGNATURE", "true")
            wait_until(lambda: made(f"http://127.0.0.1:{s3}/kv-pages"), 60)
            yield f"s3://kv-pages/baton?endpoint=http://127.0.0.1:{s3}"
    finally:
        server.kill()
        server.wait()


def made(url: str) -> bool:
    request = urllib.request.Request(url, method="PUT")
    try:
        return urllib.request.urlopen(request, timeout=5).status == 200
    except OSError:
        return False


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "secret"
    file.write_text("a secret of some length")
    return str(file)


@pytest.fixture(params=["mooncake", "bucket"])
def address(request) -> str:
    return request.getfixturevalue(request.param)


def test_objects_come_back_from_a_server(address, secret):
    ends = Ends(address, secret)
    try:
        ends.arena.slots.random_(0, 256)
        before = ends.arena.slots.clone()
        assert ends.answer(STORE, A, B).good == [True, True]
        assert ends.answer(LOOKUP, A, b"c" * 32, B).good == [True, False, True]
        assert ends.answer(LOAD, B, b"c" * 32, first_slot=20).good == [True, False]
        assert (ends.arena.slots[20:24] == before[5:9]).all()
    finally:
        ends.process.stop()


def test_mooncake_object_of_another_size_is_damaged(mooncake, secret):
    """Its name does not tell the number of pages."""
    key = b"d" * 32
    ends = Ends(mooncake, secret, pages=2)
    other = Ends(mooncake, secret)
    try:
        assert ends.answer(STORE, key).good == [True]
        answer = other.answer(LOAD, key)
        assert (answer.good, answer.damaged) == ([False], 1)
        assert ends.answer(LOOKUP, key).good == [False]
        answer = other.answer(LOAD, key)
        assert (answer.good, answer.damaged) == ([False], 0)
    finally:
        ends.process.stop()
        other.process.stop()


def test_parts_of_ranks_come_back_from_a_server(address, secret):
    ends = Ends(address, secret, heads=[(0, 1), (1, 2)])
    try:
        for arena in ends.arenas:
            arena.slots.random_(0, 256)
        before = [arena.slots.clone() for arena in ends.arenas]
        assert ends.answer(STORE, A, B).good == [True, True]
        assert ends.answer(LOAD, B, b"c" * 32, first_slot=20).good == [True, False]
        for arena, slots in zip(ends.arenas, before, strict=True):
            assert (arena.slots[20:24] == slots[5:9]).all()
    finally:
        ends.process.stop()


@pytest.mark.slow
def test_an_engine_over_a_server(address, path, want, secret):  # noqa: F811
    """A prompt is computed where that seems sooner, so on a busy machine the first may all be."""
    with running(path, **SMALL, kv_stores=(address,), kv_secret_file=secret) as engine:
        for _ in range(4):
            speaks(engine, want)
            if (loaded := engine.load().tiers.loaded_tokens[address.partition(":")[0]]) >= 256:
                break
    assert loaded >= 256


@pytest.mark.slow
def test_a_model_with_windows_over_a_server(address, secret, tmp_path):
    """Pages of both groups come back, or a wrong token shows."""
    model = write_tiny_model(tmp_path, tokenizer=False, **GROUPED["gemma3"], max_positions=1024)
    with running(model, num_pages=400, page_size=64, max_step_tokens=256) as large:
        answers = talk(large, conversations(COUNT), ROUNDS)
    with running(model, **TIGHT, kv_stores=(address,), kv_secret_file=secret) as engine:
        assert len(engine.pools) > 1
        for _ in range(4):
            assert talk(engine, conversations(COUNT), ROUNDS) == answers
            if (loaded := engine.load().tiers.loaded_tokens[address.partition(":")[0]]) >= 256:
                break
        wait_until(lambda: engine.load().tiers.held_slots == 0)
    assert loaded >= 256


@pytest.mark.parametrize(
    "scheme", ["mooncake://127.0.0.1:1", "s3://kv-pages?endpoint=http://127.0.0.1:1"]
)
def test_a_server_that_is_not_there_is_named(path, secret, bucket, mooncake, scheme):  # noqa: F811
    config = EngineConfig(model=str(path), **SMALL, kv_stores=(scheme,), kv_secret_file=secret)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:1") as raised:
        Engine.build(config)
    assert "no store of this kind" not in str(raised.value)


@pytest.mark.slow
def test_mooncake_can_be_used_after_a_member_has_died(mooncake, secret):
    """Its master gives out the dead one's memory for some seconds."""
    for _ in range(3):
        ends = Ends(mooncake, secret)
        ends.process._ending.set()  # It is not started again.
        os.kill(ends.process.pid, signal.SIGKILL)
