"""The deployment's files: what the tools they are for say of them, and what they promise."""

from __future__ import annotations

import filecmp
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_kit import COMPOSE, ROOT, run_tool, seconds, services

from router.settings import RouterSettings
from serving.settings import resolve
from telemetry.metrics.table import DECLARED
from worker.settings import WorkerSettings

RULES = ("recording.yml", "alerts.yml")
WORKERS = {"cpu": ("prefill-cpu", "decode-cpu"), "gpu": ("prefill", "decode")}
WORKERS["rdma"] = ("prefill-rdma", "decode-rdma")
DRAIN_AND_MORE_S = 20
"""What a process may take after its drain: last words, pushes in progress, spans."""


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return services()


@pytest.mark.parametrize(
    "profile", ["cpu", "gpu", "rdma", "observability"], ids="profile-{}".format
)
def test_docker_compose_takes_every_profile(profile: str) -> None:
    shown = yaml.safe_load(run_tool("docker-compose", "--profile", profile, "config"))["services"]
    started = {name for name, one in shown.items() if profile in one.get("profiles", [profile])}
    watchers = {"jaeger", "prometheus", "grafana"} if profile == "observability" else set()
    assert started == {"certs", "router", "pause", *WORKERS.get(profile, ()), *watchers}


def test_only_what_both_versions_of_compose_take() -> None:
    """1.29 has no `version`-less `start_interval`, `configs.content`, `include` or `!reset`."""
    text = (COMPOSE / "docker-compose.yml").read_text()
    raw = yaml.safe_load(text)
    top = set(raw) - {key for key in raw if key.startswith("x-")}
    assert top == {"services", "networks", "volumes"}
    for newer in ("start_interval", "include:", "!reset", "!override", "required:", "develop:"):
        assert newer not in text
    assert "container_name" not in text  # would forbid --scale


def test_routers_that_are_scaled_can_have_a_port_each() -> None:
    """What `--scale router=2` needs on the host."""
    text = (COMPOSE / "docker-compose.yml").read_text()
    ports = {"GRPC": 50051, "HTTP": 8000, "INTERNAL": 50050, "ADMIN": 9090}
    given = {f"BATON_{name}_PORTS": f"{port + 100}-{port + 101}" for name, port in ports.items()}
    assert set(given) == set(re.findall(r"\w+_PORTS", text))
    published = services(**given)["router"]["ports"]
    assert sorted(published) == sorted(
        f"127.0.0.1:{port + 100}-{port + 101}:{port}/tcp" for port in ports.values()
    )


def test_workers_share_what_cuda_ipc_and_the_proof_of_death_need(found: Any) -> None:
    assert found["pause"]["ipc"] == "shareable"
    for name in (name for names in WORKERS.values() for name in names):
        worker = found[name]
        assert worker["ipc"] == worker["pid"] == "service:pause"
        assert not any("published" in str(port) for port in worker.get("ports", []))
    for name in (*WORKERS["gpu"], *WORKERS["rdma"]):
        (device,) = found[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["count"] == "all"
        assert found[name]["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
        assert found[name]["ulimits"]["nofile"]
        assert found[name]["environment"]["BATON_GPU_SLOTS_DIR"] == "/run/baton/slots"


def test_workers_on_cpus_start_where_docker_may_not_lift_the_limit_on_locked_memory(
    found: Any,
) -> None:
    for name in WORKERS["cpu"]:
        assert "memlock" not in found[name]["ulimits"]


def test_docker_waits_longer_than_the_drain(found: Any) -> None:
    drained = [one for one in found.values() if "BATON_DRAIN_S" in one.get("environment", {})]
    assert len(drained) == 7
    for one in drained:
        drain_s = float(one["environment"]["BATON_DRAIN_S"])
        assert seconds(one["stop_grace_period"]) >= drain_s + DRAIN_AND_MORE_S


def test_nothing_of_ours_needs_root_or_a_writable_root(found: Any) -> None:
    for one in found.values():
        if "build" in one:
            assert one["read_only"] is True
            assert one["cap_drop"] == ["ALL"]
            assert "no-new-privileges:true" in one["security_opt"]
            assert "/tmp" in one["tmpfs"]
    stages = (COMPOSE / "Dockerfile").read_text().split("\nFROM ")
    targets = {one["build"]["target"] for one in found.values() if "build" in one}
    final = [stage for stage in stages if stage.split()[2] in targets]
    assert len(final) == len(targets) == 3
    assert all(re.search(r"^USER 10001:10001$", stage, re.MULTILINE) for stage in final)


def test_every_container_is_bounded(found: Any) -> None:
    for name, one in found.items():
        assert one["mem_limit"] not in ("", "0", 0), name
        if name != "pause":  # It owns the namespace of all workers' processes.
            assert one["pids_limit"] > 0, name
        if "build" in one:
            assert one["ulimits"]["nofile"] == {"soft": 65536, "hard": 65536}, name
            assert one["ulimits"]["core"] == 0, name


def test_networks_are_split(found: Any) -> None:
    """Only the router is in the clients' network, and nobody reaches the authority's key."""
    of = {name: set(one.get("networks", ())) for name, one in found.items()}
    assert {name for name, networks in of.items() if "clients" in networks} == {"router"}
    assert of["grafana"] == {"watchers"}
    assert not any("default" in networks for networks in of.values())
    assert found["certs"]["network_mode"] == found["pause"]["network_mode"] == "none"
    mounts = {
        name: {str(v).split(":")[0] for v in one.get("volumes", ()) if "certs-" in str(v)}
        for name, one in found.items()
    }
    assert [name for name, seen in mounts.items() if "certs-authority" in seen] == ["certs"]
    assert [name for name, seen in mounts.items() if "certs-router" in seen] == ["certs", "router"]
    for names in WORKERS.values():
        for name in names:
            pool = name.partition("-")[0]
            assert mounts[name] == {f"certs-{pool}"}, name
            assert found[name]["environment"]["BATON_TLS_DIR"] == f"/certs/{pool}"


def test_nobody_has_a_password_that_everybody_knows(found: Any) -> None:
    grafana = found["grafana"]["environment"]
    assert grafana["GF_SECURITY_ADMIN_PASSWORD"] == ""
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    text = (COMPOSE / "docker-compose.yml").read_text()
    assert not re.search(r"(?i)password: *\S*admin", text)


def test_every_image_has_a_version(found: Any) -> None:
    ours = {one["image"] for one in found.values() if "build" in one}
    for image in {one["image"] for one in found.values()} - ours:
        assert re.search(r":v?\d+\.\d+", image), image


def test_everything_mounted_and_copied_is_there(found: Any) -> None:
    mounted = [str(v) for one in found.values() for v in one.get("volumes", ())]
    for folder in (v.split(":")[0] for v in mounted if v.startswith(str(COMPOSE))):
        assert Path(folder).exists() or folder.endswith("/models"), folder
    copied = re.findall(
        r"^COPY ([a-z_][^\n]*) \S+$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE
    )
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for name in (name for line in copied for name in line.split()):
        assert (ROOT / name).exists()
        assert f"!{name}" in allowed


def test_a_change_of_code_leaves_the_packages_of_others_in_place() -> None:
    """They are gigabytes; their stages see nothing of the code."""
    text = (COMPOSE / "Dockerfile").read_text()
    stages = dict(
        re.findall(r"^FROM (\w+ AS \S+)\n(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL)
    )
    packages = [stage for stage in stages if stage.endswith("-packages")]
    assert len(packages) == 3
    for stage in packages:
        assert stage.startswith("needs AS ")
        assert "COPY" not in stages[stage]
    (copied,) = re.findall(r"^COPY (.*) \./$", stages["venv AS needs"], re.MULTILINE)
    assert copied.split() == ["pyproject.toml", "constraints-cpu.txt"]


def test_hadolint() -> None:
    run_tool("hadolint", "Dockerfile")


def test_promtool() -> None:
    run_tool("promtool", "check", "config", "--syntax-only", "prometheus/prometheus.yml")
    run_tool("promtool", "check", "rules", *(f"prometheus/{name}" for name in RULES))
    run_tool("promtool", "test", "rules", "prometheus/rules_test.yml")


def test_every_alert_is_tested_or_says_why_not() -> None:
    """Those that are one comparison with a constant need no test of their own."""
    tested = set(re.findall(r"alertname: (\w+)", read("rules_test.yml")))
    simple = {
        "BatonOverloaded",
        "BatonPreempting",
        "BatonStaleNotifications",
        "BatonPagesDamaged",
        "BatonSpansLost",
        "BatonEventLoopLate",
    }
    assert set(re.findall(r"alert: (\w+)", read("alerts.yml"))) == tested | simple


def test_every_alert_has_its_line_in_the_docs() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text()
    told = re.findall(r"^\| `(Baton\w+)` \| (\w+) \|", page, re.MULTILINE)
    groups = yaml.safe_load(read("alerts.yml"))["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    assert told == [(rule["alert"], rule["labels"]["severity"]) for rule in alerts]


def test_every_variable_stands_in_env_with_its_default() -> None:
    text = (COMPOSE / "docker-compose.yml").read_text()
    defaults = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", text))
    assert set(defaults) == set(re.findall(r"\$\{([A-Z_]+)", text))
    told = dict(
        re.findall(r"^(?:# )?([A-Z_]+)=(.*)$", (COMPOSE / ".env").read_text(), re.MULTILINE)
    )
    assert told == defaults | {"COMPOSE_PROFILES": "gpu,observability"}


def test_what_is_set_for_our_processes_are_settings_that_fit(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no variable set: a worker would not start otherwise, and a misspelt one is ignored."""
    ours = [one for one in found.values() if "build" in one and "environment" in one]
    assert len(ours) == 7
    for one in ours:
        is_router = one["command"] == ["router"]
        with monkeypatch.context() as patch:
            for name, value in one["environment"].items():
                patch.setenv(name, str(value))
            if is_router:
                sources = resolve(RouterSettings, "router", {}).sources
            else:
                sources = resolve(WorkerSettings, "worker", {}).sources
        assert set(one["environment"]) - {"HF_TOKEN"} <= set(sources.values())


def test_dashboards_are_current(tmp_path: Path) -> None:
    make = [sys.executable, str(COMPOSE / "grafana" / "make_dashboards.py"), str(tmp_path)]
    subprocess.run(make, check=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 5
    there = COMPOSE / "grafana" / "dashboards"
    assert sorted(path.name for path in there.iterdir()) == names
    assert filecmp.cmpfiles(tmp_path, there, names, shallow=False) == (names, [], [])


def test_dashboards_fit_what_is_provisioned() -> None:
    provisioned = yaml.safe_load(
        (COMPOSE / "grafana/provisioning/datasources/baton.yml").read_text()
    )
    known = {source["uid"] for source in provisioned["datasources"]}
    for path, panel in panels():
        assert {target["datasource"]["uid"] for target in panel["targets"]} <= known, path
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    ids = [(path, panel["id"]) for path, panel in panels()]
    assert len(ids) == len(set(ids)) > 30


def test_thresholds_are_bucket_boundaries() -> None:
    for metric, boundary in re.findall(r"(gen_ai_\w+)_bucket\{le=\"([\d.]+)\"\}", read(RULES[0])):
        assert float(boundary) in DECLARED[metric].buckets


def read(name: str) -> str:
    return (COMPOSE / "prometheus" / name).read_text()


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((COMPOSE / "grafana" / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            yield path.name, panel
