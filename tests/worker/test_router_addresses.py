"""Where routers are, by names that come to stand for others."""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any

import pytest
from stand_in_names import Names
from waiting import WAIT_S, wait_until

from worker import router_addresses
from worker.router_addresses import RouterAddresses


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_addresses, "LOOKUP_INTERVAL_S", 0.02)
    monkeypatch.setattr(router_addresses, "UNKNOWN_INTERVAL_S", 0.02)


def warnings(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (vars(record)["router"], vars(record)["cause"])
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]


def test_addresses_stand_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_asks(*_: Any, **__: Any) -> None:
        raise AssertionError("looked up")

    monkeypatch.setattr(socket, "getaddrinfo", nobody_asks)
    given = ["10.0.0.1:50050", "[::1]:50050", "[2001:db8::2]:1", "localhost:50050"]
    with RouterAddresses([*given, "10.0.0.1:50050"]) as routers:
        assert routers.listed() == given


def test_a_name_stands_for_every_address_of_both_families(names: Names) -> None:
    names["router"] = ["10.0.0.2", "10.0.0.1", "2001:db8::1", "10.0.0.2"]
    names["other"] = ["10.0.0.1", "10.0.0.3"]
    with RouterAddresses(["router:50050", "10.0.0.9:1", "other:50050"]) as routers:
        found = ["10.0.0.1:50050", "10.0.0.2:50050", "[2001:db8::1]:50050", "10.0.0.3:50050"]
        wait_until(lambda: set(routers.listed()) == {*found, "10.0.0.9:1"}, show=routers.listed)
        assert len(routers.listed()) == 5


def test_a_name_is_waited_for_and_followed(
    names: Names,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "worker.router_addresses")
    missed = ("router:1", "Name or service not known")
    names["router"] = []
    with RouterAddresses(["router:1"]) as routers:
        wait_until(lambda: warnings(caplog))
        names["router"] = ["10.0.0.1"]
        wait_until(lambda: routers.listed() == ["10.0.0.1:1"])
        assert warnings(caplog) == [missed]  # once, however often it was not found
        names["router"] = ["10.0.0.2", "10.0.0.1"]
        wait_until(lambda: routers.listed() == ["10.0.0.1:1", "10.0.0.2:1"])
        names["router"] = []
        wait_until(lambda: len(warnings(caplog)) == 2)
        assert routers.listed() == ["10.0.0.1:1", "10.0.0.2:1"]  # a name server may be down
        names["router"] = ["10.0.0.3"]
        wait_until(lambda: routers.listed() == ["10.0.0.3:1"])
    assert warnings(caplog) == [missed] * 2
    told = [vars(record).get("addresses") for record in caplog.records]
    assert [addresses for addresses in told if addresses] == [
        "10.0.0.1:1",
        "10.0.0.1:1,10.0.0.2:1",
        "10.0.0.3:1",
    ]


def test_what_cannot_be_a_name_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with RouterAddresses(["router..internal:1"]) as routers:
        wait_until(lambda: warnings(caplog))
        assert routers.listed() == []
    ((router, cause),) = warnings(caplog)
    assert router == "router..internal:1"
    assert "label" in cause


def test_a_lookup_that_hangs_keeps_nobody(
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the other names nor the end of the process."""
    free, ordinary = threading.Event(), socket.getaddrinfo

    def slow(host: str, *args: Any, **options: Any) -> Any:
        if host == "slow":
            free.wait(2 * WAIT_S)
        return ordinary(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    names.update(slow=["10.0.0.1"], quick=["10.0.0.2"])
    with RouterAddresses(["slow:1", "quick:1"]) as routers:
        wait_until(lambda: routers.listed() == ["10.0.0.2:1"])
        began_s = time.monotonic()
    assert time.monotonic() - began_s < WAIT_S
    (looking,) = [one for one in threading.enumerate() if one.name == "lookup-slow:1"]
    assert looking.daemon
    free.set()
    looking.join(WAIT_S)
    assert not looking.is_alive()
