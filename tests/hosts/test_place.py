"""Which of a worker's hosts this one is, and one line for each thing that is wrong with that."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from settings_kit import settings_of

from serving.settings import SettingsError, resolve
from worker.hosts import place as place_module
from worker.hosts.digest import model_digest
from worker.hosts.interfaces import DEVICES, RDMA, addresses, keep_data_plane_on
from worker.hosts.place import place_of, placed, with_place
from worker.settings import WorkerSettings

HERE = next((str(one) for one in addresses() if not one.is_loopback and one.version == 4), "")
NEEDS = pytest.mark.skipif(not HERE, reason="this machine has no address but loopback")
GOOD: dict[str, Any] = {
    "nodes": 2,
    "node": 0,
    "leader": f"{HERE}:50070",
    "fabric": f"trusted:{HERE}/32",
    "tp": 4,
    "tls_dir": "certs",
}
LOOPBACK = "is loopback here, which other hosts do not reach"
FOREIGN = "is no address of this host"
THERE = "192.0.2.77"
NO_LEADER = "leader must be the HOST:PORT or [V6]:PORT of node 0, the same on all 2 hosts"
NO_TLS = "nodes 2 need tls_dir: agents of other hosts join by certificates alone"


def settings(**changed: Any) -> WorkerSettings:
    return settings_of(WorkerSettings, **{**GOOD, **changed})


@NEEDS
def test_the_leader_listens_where_it_was_named() -> None:
    place = place_of(settings())
    assert place is not None
    assert (place.listen, place.fabric) == (f"{HERE}:50070", HERE)
    agent = place_of(settings(node=1))
    assert agent is not None
    assert (agent.node, agent.address) == (1, "")


@NEEDS
@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"nodes": 3}, "nodes 3 must divide the 4 ranks of pp 1 and tp 4"),
        ({"nodes": 8}, "nodes 8 must divide the 4 ranks of pp 1 and tp 4"),
        ({"node": 2}, "node 2 must be below nodes 2: hosts count from 0"),
        ({"node": -1}, "node must say which of 2 hosts this is, from 0 on"),
        ({"leader": ""}, NO_LEADER),
        ({"leader": "127.0.0.1:1"}, f"leader 127.0.0.1 {LOOPBACK}"),
        ({"leader": f"{THERE}:1"}, f"node 0 is the leader, and leader {THERE}:1 {FOREIGN}"),
        ({"tls_dir": ""}, NO_TLS),
        ({"tls_dir": "", "insecure": True}, NO_TLS),
        (
            {"fabric": ""},
            "nodes 2 need fabric: activations and KV pages are not encrypted, so name their"
            " network, as trusted:CIDR or encrypted:CIDR",
        ),
        ({"fabric": "trusted:192.0.2.128/30"}, "this host has no address in fabric 192.0.2.128/30"),
        (
            {"kv_store": "disk:/x?gib=1", "kv_host_gib": 1},
            "kv_store needs nodes 1: its process maps the memory of all ranks",
        ),
        ({"nodes": 1}, "`node`, `leader` and `fabric` need `nodes` above 1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingsError) as found:
        place_of(settings(**changed))
    assert str(found.value) == f"worker: {line}"


@NEEDS
@pytest.mark.parametrize(
    ("fabric", "why"),
    [
        ("10.0.0.0/8", "must be trusted:CIDR or encrypted:CIDR"),
        ("plain:10.0.0.0/8", "must be trusted:CIDR or encrypted:CIDR"),
        ("trusted:0.0.0.0/0", "must be one network, and not all addresses"),
        ("trusted:10.0.0.1/8", "10.0.0.1/8 has host bits set"),
        ("trusted:10.0.0.300/8", "does not appear to be an IPv4 or IPv6 network"),
    ],
)
def test_a_fabric_says_how_it_is_protected_and_is_one_network(fabric: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        place_of(resolve(WorkerSettings, "worker", {**GOOD, "fabric": fabric}).settings)


LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "lead.svc"}
TORCHRUN = {"NODE_RANK": "1", "GROUP_RANK": "0", "MASTER_ADDR": "m", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "environment", "found"),
    [
        ({}, {}, (1, 0, "")),
        ({}, LWS, (2, 1, "lead.svc:50070")),
        ({}, {**LWS, "LWS_GROUP_SIZE": "1"}, (1, 0, "")),
        ({"nodes": 1}, LWS, (1, 0, "")),
        ({"leader": "x:7", "node": 0}, LWS, (2, 0, "x:7")),
        ({"nodes": 2}, TORCHRUN, (2, 1, "m:50070")),
        ({}, TORCHRUN, (1, 0, "")),
        ({"nodes": 2}, {"GROUP_RANK": "1", "MASTER_ADDR": "m:8"}, (2, 1, "m:8")),
        ({"nodes": 2}, {}, (2, -1, "")),
        ({"nodes": 2, "leader": "fd00::2"}, {}, (2, -1, "[fd00::2]:50070")),
        ({"nodes": 2, "leader": "[fd00::2]:7"}, {}, (2, -1, "[fd00::2]:7")),
    ],
)
def test_the_environment_completes_the_settings(
    given: dict[str, Any], environment: dict[str, str], found: tuple[int, int, str]
) -> None:
    got = with_place(settings_of(WorkerSettings, tp=4, **given), environment)
    assert (got.nodes, got.node, got.leader) == found


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, r"nodes 2 must divide .* \(LWS_GROUP_SIZE says 2 hosts: nodes 1 is for a worker of"),
        ({"nodes": 2}, "nodes 2 must divide the 1 ranks of pp 1 and tp 1$"),
    ],
)
def test_where_the_number_of_hosts_comes_from(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        placed(settings_of(WorkerSettings, **given), LWS)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(SettingsError, match="LWS_GROUP_SIZE must be a number"):
        with_place(settings_of(WorkerSettings), {"LWS_GROUP_SIZE": "two"})


def looked_up(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """What the look-ups say, one after the other; the last of them again and again. Empty: no."""
    left = list(answers)

    def answer(*_: Any, **__: Any) -> list[Any]:
        found = left.pop(0) if len(left) > 1 else left[0]
        if not found:
            raise OSError(-2, "Name or service not known")
        return [(0, 0, 0, "", (found, 0))]

    monkeypatch.setattr(place_module.socket, "getaddrinfo", answer)
    monkeypatch.setattr(place_module, "AGAIN_S", 0.01)


@NEEDS
@pytest.mark.parametrize("node", [0, 1])
def test_a_leader_may_get_its_name_late(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 may find the address of the container before it under its own name."""
    looked_up(monkeypatch, "", "", *([THERE] if node == 0 else []), HERE)
    place = place_of(settings(node=node, leader="lead.svc:1"))
    assert place is not None
    assert place.address == (HERE if node == 0 else "")


@NEEDS
def test_a_name_that_is_not_the_leaders_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up(monkeypatch, THERE)
    monkeypatch.setattr(place_module, "FORM_S", 0.05)
    with pytest.raises(SettingsError, match=f"leader lead.svc:1 {FOREIGN}"):
        place_of(settings(leader="lead.svc:1"))


@NEEDS
def test_an_unknown_leader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up(monkeypatch, "")
    monkeypatch.setattr(place_module, "FORM_S", 0.05)
    with pytest.raises(SettingsError, match="leader nowhere is not known here: Name or service"):
        place_of(settings(leader="nowhere:1"))


@pytest.mark.parametrize("named", ["", *RDMA])
def test_the_data_plane_stays_in_its_network_unless_devices_are_named(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {named: "mlx5_0"} if named else {}
    monkeypatch.setattr(os, "environ", environ)
    keep_data_plane_on("eth7")
    assert {environ[variable] for variable in DEVICES} == {"eth7"}
    assert environ.get("NCCL_IB_DISABLE", "") == ("" if named else "1")


def test_another_model_has_another_digest(tmp_path: Path) -> None:
    """Numbers of tensors aside: the ranks compare these once they have read them."""
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    header = b'{"x":{"dtype":"F32"}}'
    found = set()
    for change in range(5):
        config.write_text("{}" if change != 1 else '{"a": 1}')
        head = header if change != 2 else header.replace(b"F32", b"F16")
        weights.write_bytes(len(head).to_bytes(8, "little") + head + bytes(40 + (change == 3)))
        if change == 4:
            weights.rename(tmp_path / "other.safetensors")
        found.add(model_digest(str(tmp_path)))
    assert len(found) == 5
    before = model_digest(str(tmp_path))
    (tmp_path / "other.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"1" * 40
    )
    assert model_digest(str(tmp_path)) == before
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF")
    one = model_digest(str(gguf))
    gguf.write_bytes(b"GGUF1")
    assert model_digest(str(gguf)) != one
    (tmp_path / "short.safetensors").write_bytes(b"123")
    assert model_digest(str(tmp_path)) != before
