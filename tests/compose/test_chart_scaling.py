"""Scaling rules: both forms say what `bench.scaling` simulates. What their queries give."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_kit import CHART, KUBERNETES, RELEASE, faults, manifests
from compose_kit import run_tool
from debian import program
from test_compose_prometheus import Prometheus, wait_ready
from waiting import wait_until

from bench import scaling
from bench.balance import TOKEN_S
from router.workers.balance import DECODE, PREFILL
from telemetry.metrics.table import DECLARED

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
SIZES = '"scaling": {"min": 2, "max": 12}'
POOLS = ", ".join(
    f'{{"name": "{role}s", "role": "{role}", {SIZES}}}' for role in ("prefill", "decode", "both")
)
ROLES = {f"{RELEASE}-prefills": PREFILL, f"{RELEASE}-decodes": DECODE}


def made(by: str) -> list[dict[str, Any]]:
    more = [f"scaling.by={by}", "scaling.prometheus=http://prometheus:9090", "model=demo"]
    more += [
        "monitor.enabled=true",
        "monitor.labels.release=stack",
        f"scaling.tokenMillis={TOKEN_S * 1000:.0f}",
    ]
    sets = [f"--set={one}" for one in more]
    return manifests(CHART / "values.yaml", *sets, f"--set-json=pools=[{POOLS}]")


def spec_of(found: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == kind}


def check_behavior(behavior: dict[str, Any]) -> None:
    up, down = behavior["scaleUp"], behavior["scaleDown"]
    assert up["stabilizationWindowSeconds"] == 0
    assert up["policies"] == [{"type": "Percent", "value": 100, "periodSeconds": scaling.UP_S}]
    assert down["stabilizationWindowSeconds"] == scaling.WINDOW_S
    assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": scaling.DOWN_S}]


def test_keda_scales_as_simulated(tmp_path: Path) -> None:
    found = made("keda")
    assert faults(found, tmp_path) == []
    for name, spec in spec_of(found, "ScaledObject").items():
        assert spec["scaleTargetRef"]["name"] == name
        assert spec["pollingInterval"] == scaling.SYNC_S
        check_behavior(spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"])
        triggers = {
            one["name"]: scaling.Trigger(
                round(float(one["metadata"]["threshold"]), 6), one["metricType"] == "AverageValue"
            )
            for one in spec["triggers"]
        }
        if name in ROLES:
            assert triggers == dict(scaling.TRIGGERS[ROLES[name]])
    sets = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "StatefulSet"}
    assert set(sets) == set(spec_of(found, "ScaledObject"))
    assert not any("replicas" in spec for spec in sets.values())


def test_a_plain_autoscaler_scales_by_the_same(tmp_path: Path) -> None:
    found, keda = made("hpa"), spec_of(made("keda"), "ScaledObject")
    assert faults(found, tmp_path) == []
    rules = spec_of(found, "PrometheusRule")
    sought = [one for one in found if one["kind"] in ("PodMonitor", "PrometheusRule")]
    assert {one["metadata"]["labels"]["release"] for one in sought} == {"stack"}
    (adapter,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"][
        "external"
    ]
    (name_of,) = re.findall(r'__name__=~"([^"]+)"', adapter["seriesQuery"])
    for name, spec in spec_of(found, "HorizontalPodAutoscaler").items():
        check_behavior(spec["behavior"])
        recorded = {
            one["record"]: (one["expr"], one["labels"])
            for one in rules[f"{name}-scaling"]["groups"][0]["rules"]
        }
        for metric, trigger in zip(spec["metrics"], keda[name]["triggers"], strict=True):
            external = metric["external"]
            expression, labels = recorded[external["metric"]["name"]]
            assert re.search(name_of, external["metric"]["name"])
            assert expression == trigger["metadata"]["query"]
            assert external["metric"]["selector"]["matchLabels"].items() <= labels.items()
            assert external["target"]["type"] == trigger["metricType"]
            (value,) = (v for k, v in external["target"].items() if k != "type")
            wanted = 1000 * float(trigger["metadata"]["threshold"])
            assert float(value.removesuffix("m")) == pytest.approx(wanted, abs=1)


def series(pool: str, shown: dict[str, str]) -> list[dict[str, str]]:
    at = f'namespace="default", release="{RELEASE}", pool="{pool}"'
    found = []
    for metric, values in shown.items():
        name, _, own = metric.partition("{")
        own = f", {own[:-1]}" if own else ""
        found.append({"series": f"{name}{{{at}{own}}}", "values": values})
    return found


PREFILLS = {
    # One works all the time, the other a fifth of it. Both compute 1,000 tokens a second.
    'baton_prefill_tokens_total{pod="a", source="computed"}': "0+15000x40",
    'baton_prefill_tokens_total{pod="a", source="cached"}': "0+90000x40",
    'baton_prefill_tokens_total{pod="b", source="computed"}': "0+3000x40",
    'baton_prefill_tokens_per_second{pod="a"}': "1000x40",
    'baton_prefill_tokens_per_second{pod="b"}': "1000x40",
}
FULL = {**PREFILLS, 'baton_prefill_tokens_total{pod="b", source="computed"}': "0+14000x40"}
DECODES = {
    'baton_kv_pages{pod="a", state="used"}': "600x40",
    'baton_kv_pages{pod="a", state="granted"}': "100x40",
    'baton_kv_pages{pod="a", state="cached"}': "200x40",
    'baton_kv_pages_capacity{pod="a"}': "1000x40",
    'baton_kv_pages{pod="b", state="used"}': "100x40",
    'baton_kv_pages_capacity{pod="b"}': "1000x40",
    'baton_running_sequences{pod="a"}': "32x40",
    'baton_running_sequences{pod="b"}': "16x40",
    'baton_max_sequences{pod="a"}': "64x40",
    'baton_max_sequences{pod="b"}': "64x40",
    'baton_engine_step_seconds_bucket{pod="a", le="0.01"}': "0+80x40",
    'baton_engine_step_seconds_bucket{pod="a", le="0.02"}': "0+100x40",
    'baton_engine_step_seconds_bucket{pod="a", le="+Inf"}': "0+100x40",
}
QUEUE = (
    f'baton_queue_drain_seconds{{namespace="default", release="{RELEASE}", model="m", pod="%s"}}'
)


@pytest.mark.parametrize(
    ("pool", "shown", "queue_s", "wanted"),
    [
        ("prefills", PREFILLS, "30x40", {"busy": 1.2, "queue": 0}),
        # 28 of 30 and two pods' 30 s, to be over in 120.
        ("prefills", FULL, "30x40", {"busy": 58 / 30, "queue": 58 / 30 + 0.5}),
        ("prefills", FULL, "_x40", {"busy": 58 / 30, "queue": 0}),
        ("decodes", DECODES, "30x40", {"pages": 0.8, "slots": 0.75, "step": 0.015}),
        ("boths", FULL | DECODES, "30x40", {"busy": 58 / 30, "pages": 0.8}),
        ("prefills", {}, "_x40", {"busy": 0, "queue": 0}),
        ("decodes", {}, "_x40", {"pages": 0, "slots": 0, "step": 0}),
    ],
)
def test_what_the_queries_give(
    pool: str, shown: dict[str, str], queue_s: str, wanted: dict[str, float], tmp_path: Path
) -> None:
    rule = spec_of(made("hpa"), "PrometheusRule")[f"{RELEASE}-{pool}-scaling"]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule))
    expressions = {
        one["record"].removeprefix("baton_scaling_"): one["expr"]
        for one in rule["groups"][0]["rules"]
    }
    for expression in expressions.values():
        for name in re.findall(r"\bbaton_\w+", expression):
            assert re.sub("_(bucket|total)$", "", name) in DECLARED
    given = series(pool, shown)
    # The other pool's figures are no concern of this one, nor are those of another namespace.
    given += [{**one, "series": one["series"].replace(f'"{pool}"', '"other"')} for one in given]
    given.append({"series": QUEUE % "router-0", "values": queue_s})
    given.append({"series": QUEUE % "router-1", "values": queue_s.replace("30", "1")})
    given += [{**one, "series": one["series"].replace("default", "away")} for one in given]
    asked = [
        {
            "expr": f"round({expressions[name]}, 0.0001)",
            "eval_time": "8m",
            "exp_samples": [{"labels": "{}", "value": round(value, 4)}],
        }
        for name, value in wanted.items()
    ]
    test = {"rule_files": ["rules.yml"], "evaluation_interval": "15s", "tests": [
        {"interval": "15s", "input_series": given, "promql_expr_test": asked}]}  # fmt: skip
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    run_tool("promtool", "test", "rules", str(tmp_path / "test.yml"))


def test_pods_get_the_labels_that_rules_and_dashboards_go_by(tmp_path: Path) -> None:
    """A real Prometheus relabels what its operator would find."""
    (monitor,) = spec_of(made("keda"), "PodMonitor").values()
    (endpoint,) = monitor["podMetricsEndpoints"]
    steps = [{_snake(key): value for key, value in one.items()} for one in endpoint["relabelings"]]
    label = "__meta_kubernetes_pod_label_"
    pods = {
        "a": {f"{label}app_kubernetes_io_component": "router", "__meta_kubernetes_pod_name": "r"},
        "b": {
            f"{label}app_kubernetes_io_component": "worker",
            f"{label}baton_pool": "decodes",
            f"{label}baton_role": "decode",
            "__meta_kubernetes_pod_name": "house-decodes-0",
        },
    }
    jobs = [
        {
            "job_name": name,
            "relabel_configs": steps,
            "static_configs": [{"targets": ["127.0.0.1:1"], "labels": labels}],
        }
        for name, labels in pods.items()
    ]
    (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": jobs}))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program("prometheus"), f"--config.file={tmp_path}/prometheus.yml"]
    command += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address={address}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_ready(address, tmp_path / "log")
        found = Prometheus(address)
        wait_until(lambda: len(found.get("targets")["activeTargets"]) == 2)
        labels = [one["labels"] for one in found.get("targets")["activeTargets"]]
    finally:
        process.kill()
        process.wait(10)
    router, worker = sorted(labels, key=len)
    assert router == {"instance": "127.0.0.1:1", "job": "baton-router", "release": RELEASE}
    of = {"job": "baton-worker", "pool": "decodes", "role": "decode", "worker": "house-decodes-0"}
    assert worker == router | of


def _snake(key: str) -> str:
    """As the operator writes the name of a field."""
    return re.sub("[A-Z]", lambda found: "_" + found[0].lower(), key)
