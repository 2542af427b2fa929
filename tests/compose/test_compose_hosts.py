"""The two files for a worker on two hosts: docker-compose takes them, and they fit together."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from compose_kit import COMPOSE, clean_environment, run_tool, seconds

from serving.settings import resolve
from worker.hosts.place import _obstacle
from worker.settings import WorkerSettings

GIVEN = {
    "BATON_LEADER": "10.1.0.1:50070",
    "BATON_FABRIC": "encrypted:10.1.0.0/24",
    "BATON_ROUTERS": "10.1.0.1:50050",
    "BATON_HOST_ADDRESS": "10.1.0.1",
}


def service(name: str) -> dict[str, Any]:
    """As docker-compose understands it."""
    shown = run_tool("docker-compose", "-f", f"hosts/{name}.yml", "config", **GIVEN)
    found: dict[str, Any] = yaml.safe_load(shown)["services"][name]
    return found


@pytest.fixture
def both() -> list[dict[str, Any]]:
    return [service(name) for name in ("leader", "agent")]


def test_the_hosts_differ_in_their_number_alone(
    both: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"BATON_NODE", "BATON_LISTEN", "BATON_ADMIN", "BATON_DEBUG_ADDRESS_FILE"}
    shared = [{k: v for k, v in one["environment"].items() if k not in own} for one in both]
    assert shared[0] == shared[1]
    for node, one in enumerate(both):
        for name in set(one["environment"]) - clean_environment().keys():
            monkeypatch.setenv(name, one["environment"][name])
        settings = resolve(WorkerSettings, "worker", {"role": "prefill"}).settings
        assert (settings.node, settings.nodes, settings.ranks_here) == (node, 2, 1)
        assert _obstacle(settings) == ""
        assert one["network_mode"] == "host", "the fabric is a network of the host"
        assert one["pid"] == "service:pause", "the next start bears witness there"
        assert seconds(one["stop_grace_period"]) >= settings.drain_s + 20


def test_what_must_be_said_is_asked_for() -> None:
    for name, wanted in (("leader", set(GIVEN)), ("agent", set(GIVEN) - {"BATON_HOST_ADDRESS"})):
        text = (COMPOSE / "hosts" / f"{name}.yml").read_text()
        assert {variable for variable in GIVEN if f"${{{variable}:?" in text} == wanted
