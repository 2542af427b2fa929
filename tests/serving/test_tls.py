"""Certificates of processes: checked at the start, replaced while they run, and made."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from certificate_kit import EXPIRED, ROUTER, of_pool, of_router, written
from typer.testing import CliRunner
from waiting import until

from baton.client.clients import Client
from baton.tls import TlsFiles, check_scheme
from console.cli import app
from router.settings import RouterSettings
from serving.net.internal_net import ClearNet, TlsNet, routers_net, server_name_of, workers_net
from serving.net.refusals import Refusals, connections
from serving.net.tls import Certificate, Rotating, TlsError, http_context, read_door, read_member
from worker.settings import WorkerSettings


def test_a_worker_starts_with_a_certificate_of_its_name_alone(tmp_path: Path) -> None:
    files = of_pool(tmp_path, "decode")
    assert isinstance(workers_net(files, "decode-7"), TlsNet)
    with pytest.raises(TlsError, match="is not of prefill-0, but of decode, decode-"):
        workers_net(files, "prefill-0")
    with pytest.raises(TlsError, match="is no router's"):
        routers_net(files)
    assert isinstance(workers_net(TlsFiles(), "anybody"), ClearNet)


def test_names_and_patterns_of_names() -> None:
    shared, own = frozenset({"decode", "decode-*"}), frozenset({"decode-0"})
    assert server_name_of(shared, "decode-0") == "decode"
    assert server_name_of(own, "decode-0") == "decode-0"
    assert server_name_of(own, "decode-1") == ""
    assert server_name_of(shared, "decoder-0") == ""
    assert server_name_of(frozenset({"decode-*"}), "decode-0") == ""  # TLS could not check it
    assert server_name_of(frozenset({"*", "-*", ""}), "decode-0") == ""


@pytest.mark.parametrize(
    ("why", "made"),
    [
        ("expired", {**EXPIRED}),
        ("not yet valid", {"from_now_days": 1.0}),
        ("local issuer", {"by": "foreign"}),
    ],
)
def test_no_process_starts_with_a_certificate_that_peers_refuse(
    tmp_path: Path, why: str, made: dict[str, float]
) -> None:
    with pytest.raises(TlsError, match=why):
        read_member(written(tmp_path, ROUTER, **made))  # type: ignore[arg-type]


def test_files_that_are_missing_or_torn_are_named(tmp_path: Path) -> None:
    files = of_router(tmp_path)
    for wrong in (files._replace(key="/nowhere/key.pem"), files._replace(ca="/nowhere/ca.pem")):
        with pytest.raises(TlsError, match="/nowhere/"):
            read_member(wrong)
    other = of_router(tmp_path / "other")
    with pytest.raises(TlsError, match="no pair"):
        read_member(files._replace(key=other.key))
    (tmp_path / "text").write_text("nothing")
    with pytest.raises(TlsError, match="text has no certificate"):
        read_member(files._replace(ca=str(tmp_path / "text")))
    with pytest.raises(TlsError, match="no pair"):
        read_door(files._replace(cert=str(tmp_path / "text")))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_good_replacement_is_taken_and_a_bad_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, files = Clock(), of_router(tmp_path)
    rotating = Rotating(files, read_member, lambda one: one.cert, clock)
    first = rotating.now()

    def looked_at() -> bytes:
        """As it is when the files have stood still for a look."""
        for _ in range(3):
            clock.now_s += 1.0
            rotating.now()
        return rotating.now()

    of_router(tmp_path)
    assert rotating.now() == first  # It was looked at just now.
    assert (second := looked_at()) != first
    assert rotating.version == 1
    caplog.set_level(logging.ERROR)
    written(tmp_path, ROUTER, **EXPIRED)
    assert looked_at() == second
    Path(files.key).unlink()
    assert looked_at() == second
    causes = [record.cause for record in caplog.records]  # type: ignore[attr-defined]
    assert "expired" in causes[0]
    assert "cannot be read" in causes[1]
    assert len(causes) == 2  # once for each
    of_router(tmp_path)
    assert looked_at() not in (first, second)


def test_a_replacement_of_another_name_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would be at the start: routers would let this process in no more."""
    monkeypatch.setattr("serving.net.tls.LOOK_S", 0.0)
    for net, why in (
        (
            workers_net(of_pool(tmp_path, "decode"), "decode-7"),
            "is not of decode-7, but",
        ),
        (routers_net(of_router(tmp_path)), "is no router's"),
    ):
        caplog.clear()
        of_pool(tmp_path, "prefill")
        assert [net.version for _ in range(3)] == [0, 0, 0]
        assert why in caplog.records[0].cause  # type: ignore[attr-defined]


async def test_a_certificate_that_ends_soon_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rotating = Rotating(written(tmp_path, ROUTER, days=2.0), read_member, lambda one: one)
    watching = asyncio.create_task(rotating.watch())
    await until(lambda: caplog.records)
    watching.cancel()
    assert caplog.records[0].message == "certificate expires and is not replaced"
    assert caplog.records[0].days == "2.0"  # type: ignore[attr-defined]


def test_a_pair_that_is_half_written_is_not_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, files = Clock(), of_router(tmp_path)
    rotating = Rotating(files, read_member, lambda one: one.cert, clock)
    other = of_router(tmp_path / "other")
    for name in ("cert", "key"):  # A look falls between the two.
        (tmp_path / f"{name}.pem").write_bytes(Path(getattr(other, name)).read_bytes())
        clock.now_s += 1.0
        rotating.now()
    clock.now_s += 1.0
    assert rotating.now() == Path(other.cert).read_bytes()
    assert caplog.records == []


@pytest.fixture
def https(tmp_path: Path) -> Iterator[tuple[int, TlsFiles, Clock]]:
    """A server that shakes hands by `http_context`, its files, and the clock of its looks."""
    clock, files = Clock(), of_router(tmp_path)
    rotating = Rotating(files._replace(ca=""), read_door, Certificate.for_http, clock)
    context = http_context(rotating.now)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listening.accept()
            except OSError:
                return
            with suppress(ssl.SSLError), context.wrap_socket(plain, server_side=True) as one:
                one.recv(1)

    threading.Thread(target=serve, daemon=True).start()
    yield listening.getsockname()[1], files, clock
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def test_http_servers_take_the_new_certificate(https: tuple[int, TlsFiles, Clock]) -> None:
    port, files, clock = https

    def seen() -> bytes | None:
        with (
            socket.create_connection(("127.0.0.1", port)) as raw,
            files._replace(cert="", key="")
            .client_context()
            .wrap_socket(raw, server_hostname="localhost") as wrapped,
        ):
            wrapped.send(b"x")
            return wrapped.getpeercert(binary_form=True)

    first = seen()
    of_router(Path(files.cert).parent)
    for _ in range(2):
        clock.now_s += 1.0
        seen()
    assert seen() != first


def test_an_http_server_of_another_name_is_not_trusted(https: tuple[int, TlsFiles, Clock]) -> None:
    port, files, _ = https
    context = files._replace(cert="", key="").client_context()
    with (
        socket.create_connection(("127.0.0.1", port)) as raw,
        pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'elsewhere'"),
    ):
        context.wrap_socket(raw, server_hostname="elsewhere")


def test_an_internal_port_is_not_open_to_others_by_mistake() -> None:
    for kind, setting in ((RouterSettings, "internal_listen"), (WorkerSettings, "listen")):
        for address in ("0.0.0.0:0", "[::]:0", "10.1.2.3:1", "baton.example:1"):
            with pytest.raises(ValueError, match=f"{setting} .* is open to other machines"):
                kind(**{setting: address})
            assert kind(**{setting: address, "insecure": True})
            assert kind(**{setting: address, "tls_dir": "certs/decode"})
        for address in ("127.0.0.1:0", "[::1]:0", "localhost:1", "127.9.9.9:1"):
            assert kind(**{setting: address})
        with pytest.raises(ValueError, match="together"):
            kind(debug={"tls_cert": "c"})


def test_settings_that_tls_cannot_protect_are_refused() -> None:
    files = {"tls_dir": "certs/decode"}
    with pytest.raises(ValueError, match="TLS does not protect"):
        WorkerSettings(listen="0.0.0.0:0", debug={"transport": "nccl"}, **files)
    assert WorkerSettings(debug={"transport": "nccl"}, **files)
    with pytest.raises(ValueError, match="grpcs://r:1 needs tls_dir"):
        WorkerSettings(otlp_endpoint="grpcs://r:1")
    with pytest.raises(ValueError, match="together"):
        RouterSettings(tls_client_ca="a")


def test_files_without_an_encrypted_address_are_a_mistake(tmp_path: Path) -> None:
    files = of_router(tmp_path)
    with pytest.raises(ValueError, match="need an address with grpcs://"):
        Client("127.0.0.1:1", tls_ca=files.ca)
    with pytest.raises(ValueError, match="come together"):
        Client("grpcs://127.0.0.1:1", tls_cert=files.cert)
    with pytest.raises(OSError, match="nowhere"):
        Client("grpcs://127.0.0.1:1", tls_ca="/nowhere")
    Client("grpcs://127.0.0.1:1", tls_ca=files.ca).close()
    check_scheme("127.0.0.1:1", TlsFiles(), "grpcs://")
    wrong = CliRunner().invoke(app, ["top", "--tls-ca", files.ca])
    assert wrong.exit_code == 2, wrong.output


def test_certs_makes_a_folder_for_each_holder(tmp_path: Path) -> None:
    def make(*more: str) -> None:
        done = CliRunner().invoke(app, ["certs", str(tmp_path / "c"), *more])
        assert done.exit_code == 0, done.output

    make("--pool", "decode", "--host", "baton.example", "--host", "10.0.0.1")
    found = {str(path.relative_to(tmp_path / "c")) for path in (tmp_path / "c").rglob("*.pem")}
    of_each = {
        f"{name}/{file}.pem" for name in ("router", "decode") for file in ("ca", "cert", "key")
    }
    assert found == of_each | {"authority/ca.pem", "authority/key.pem"}
    for path in (tmp_path / "c").rglob("key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def files(name: str) -> TlsFiles:
        return TlsFiles(
            *(str(tmp_path / "c" / name / f"{file}.pem") for file in ("ca", "cert", "key"))
        )

    assert isinstance(routers_net(files("router")), TlsNet)
    assert isinstance(workers_net(files("decode"), "decode-3"), TlsNet)
    assert "baton.example" in read_member(files("router")).names
    with pytest.raises(TlsError, match="/c has folders of decode, router: tls_dir names one of"):
        read_member(files(""))
    ca, cert = (Path(path).read_bytes() for path in files("decode")[:2])
    make("--pool", "decode")  # again: the authority stays
    assert Path(files("decode").ca).read_bytes() == ca
    assert Path(files("decode").cert).read_bytes() != cert
    refused = CliRunner().invoke(app, ["certs", str(tmp_path), "--pool", "router"])
    assert refused.exit_code == 2


def test_silent_connections_are_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals(clock)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        refusals.port = listening.getsockname()[1]
        one, other = (socket.create_connection(listening.getsockname()) for _ in range(2))
        with one, other:
            for _ in range(2):
                refusals.began()
                clock.now_s += 0.3
            assert set(connections(refusals.port)) == {one.getsockname(), other.getsockname()}
            host, port = one.getsockname()
            refusals.called(f"ipv4:{host}:{port}")
            refusals.look()
            assert not any(refusals.counts.values())
            clock.now_s += 6.0
            refusals.look()
    assert refusals.counts["handshake"] == 1
    assert caplog.records[-1].hosts == "127.0.0.1"  # type: ignore[attr-defined]


def test_ipv6_peers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as one:
            assert set(connections(port)) == {one.getsockname()}
    assert ssl.HAS_TLSv1_3


def test_a_folder_has_the_names_of_baton_certs_or_of_kubernetes(tmp_path: Path) -> None:
    here, debug = str(tmp_path), {"tls_ca": "/other/ca.pem"}
    usual = [str(tmp_path / name) for name in ("ca.pem", "cert.pem", "key.pem")]
    assert list(RouterSettings(tls_dir=here).tls[:3]) == usual
    assert list(WorkerSettings(tls_dir=here, debug=debug).tls[:3]) == ["/other/ca.pem", *usual[1:]]
    (tmp_path / "tls.crt").touch()
    secret = [str(tmp_path / name) for name in ("ca.crt", "tls.crt", "tls.key")]
    assert list(RouterSettings(tls_dir=here).tls[:3]) == secret
    assert not any(RouterSettings().tls)
