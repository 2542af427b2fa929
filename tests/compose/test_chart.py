"""The chart: what helm and Kubernetes' schemas say of it, what it refuses, and its pods, as
processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chart_kit import AGENT, CHART, KUBERNETES, RELEASE, VALUES, faults, manifests, pods, run_helm
from compose_kit import services

from router.settings import RouterSettings
from serving.settings import resolve
from worker.settings import WorkerSettings

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]
POOLS = "--set-json=pools="
ONE = '[{"name": "all", "role": "both", "replicas": 1}]'
SCALED = POOLS + '[{"name": "a", "role": "both", "scaling": {"min": 2, "max": 4}}]'
SPREAD = POOLS + (
    '[{"name": "a", "role": "both", "replicas": 1, "gpus": 2, "pp": 2, "nodes": 2, '
    '"fabric": "trusted:10.0.0.0/8"}]'
)


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_helm_and_kubernetes_take_every_values_file(
    values: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_helm("lint", "--strict", CHART, "--values", values)
    assert done.returncode == 0, done.stdout
    made = manifests(values)
    assert faults(made, tmp_path) == []
    names = [(one["kind"], one["metadata"]["name"]) for one in made]
    assert len(names) == len(set(names))
    for name, pod in pods(made):
        with monkeypatch.context() as patch:
            _check_pod(name, pod["spec"], patch)


def _check_pod(name: str, pod: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Its settings exist, and it is killed after its drain and not sooner."""
    (container,) = pod["containers"]
    given = {one["name"]: str(one.get("value", name)) for one in container["env"]}
    for key, value in given.items():
        patch.setenv(key, value.replace("$(POD_IP)", "10.0.0.1").replace("$(GROUP)", "0"))
    if container["name"] == "router":
        settings, sources, _ = resolve(RouterSettings, "router", {})
    else:
        settings, sources, _ = resolve(WorkerSettings, "worker", {})
    assert set(given) - {"POD_IP", "GROUP", "UCX_NET_DEVICES"} <= set(sources.values())
    # Routers hear of a drain from the worker itself. Of a router's, balancers hear later.
    is_router = container["name"] == "router"
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"] if is_router else 0
    assert pod["terminationGracePeriodSeconds"] == settings.drain_s + pause + 20
    secure = container["securityContext"]
    assert secure["readOnlyRootFilesystem"]
    assert not secure["allowPrivilegeEscalation"]
    assert pod["securityContext"]["runAsNonRoot"]


def test_adapters_come_from_a_claim_on_every_worker(tmp_path: Path) -> None:
    values = next(path for path in VALUES if path.stem == "two-pools")
    more = ("--set=adapters.claim=tuned", "--set=adapters.loaded.law=law-v2,adapters.loaded.b=b")
    made = manifests(values, *more)
    assert faults(made, tmp_path) == []
    for name, pod in pods(made):
        (container,) = pod["spec"]["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        mounts = {one["name"]: one for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["spec"]["volumes"]}
        if container["name"] == "router":
            assert "adapters" not in volumes.keys() | mounts.keys(), name
            continue
        settings = WorkerSettings(model="m", **{
            key.removeprefix("BATON_").lower(): env[key]
            for key in ("BATON_ADAPTERS", "BATON_ADAPTERS_DIR")
        })  # fmt: skip
        assert settings.adapters == ("b=/adapters/b", "law=/adapters/law-v2")
        assert settings.adapters_dir == mounts["adapters"]["mountPath"] == "/adapters"
        assert volumes["adapters"]["persistentVolumeClaim"]["claimName"] == "tuned"
        assert mounts["adapters"]["readOnly"]


def test_a_field_that_no_schema_knows_is_a_fault(tmp_path: Path) -> None:
    made = manifests(next(path for path in VALUES if path.stem == "two-pools"))
    for one in made:
        one["spec" if "spec" in one else "data"]["unknown"] = {}
    kinds = {"ConfigMap", "Issuer", "Certificate", "PodMonitor", "InferencePool", "StatefulSet"}
    told = "\n".join(faults(made, tmp_path))
    assert "unknown" in told
    assert len({line.split(":")[0] for line in told.splitlines()}) >= len(made), told
    assert kinds <= {one["kind"] for one in made}


@pytest.mark.parametrize(
    ("set_", "message"),
    [
        (["--set=model="], "at '/model': minLength"),
        (["--set=adapters.loaded.law=x", "--set=adapters.claim="], "loaded needs adapters.claim"),
        (["--set=adapters.loaded.law=/x"], "at '/adapters/loaded/law'"),
        ([POOLS + "[]"], "at '/pools': minItems"),
        ([POOLS + '[{"name": "a", "role": "decode", "replicas": 1}]'], "nobody could answer"),
        ([POOLS + '[{"name": "a", "role": "other", "replicas": 1}]'], "at '/pools/0/role'"),
        (
            [POOLS + '[{"name": "router", "role": "both", "replicas": 1}]'],
            "cannot be called router",
        ),
        ([POOLS + ONE[:-1] + ", " + ONE[1:]], "two pools are called all"),
        ([POOLS + '[{"name": "a", "role": "both", "replicas": 0}]'], "at '/pools/0/replicas'"),
        (["--set=pools[0].env.BATON_LISTEN=x:1"], "invalid propertyName 'BATON_LISTEN'"),
        (["--set=pools[0].secretEnv=No_name"], "at '/pools/0/secretEnv'"),
        (["--set=pools[0].grace=3"], "additional properties 'grace' not allowed"),
        (["--set=router.drainSeconds=-1"], "at '/router/drainSeconds'"),
        (["--set=router.fastPort=8000"], "at '/router/fastPort'"),
        (["--set=router.env.BATON_FAST_LISTEN=x:1"], "invalid propertyName 'BATON_FAST_LISTEN'"),
        ([POOLS + ONE.replace("1}", '1, "scaling": {"min": 1, "max": 2}}')], "oneOf"),
        ([POOLS + '[{"name": "a", "role": "both"}]'], "oneOf"),
        ([SCALED, "--set=scaling.by="], "scaling.by has to be keda or hpa"),
        ([SCALED, "--set=monitor.enabled=false"], "monitor.enabled has to be true"),
        ([SCALED, "--set=scaling.prometheus="], "scaling.prometheus: where KEDA"),
        ([SCALED.replace('"max": 4', '"max": 1')], "scaling.max is less than scaling.min"),
        (["--set=scaling.by=cpu"], "at '/scaling/by'"),
        ([SPREAD.replace(', "fabric": "trusted:10.0.0.0/8"', "")], "nodes need fabric"),
        ([SPREAD.replace("trusted:10.0.0.0/8", "10.0.0.0/8")], "at '/pools/0/fabric'"),
        ([SPREAD, "--set=tls.enabled=false"], "nodes need tls.enabled"),
        ([SPREAD.replace('"nodes": 2, ', "")], "fabric needs nodes"),
        ([SPREAD.replace('"pp": 2', '"pp": 3')], "pp must divide the 4 ranks"),
        (["--set=inferencePool.enabled=true"], "inferencePool.picker: the Service"),
    ],
)
def test_what_cannot_be_is_refused_by_name(set_: list[str], message: str) -> None:
    good = ["--set=model=demo", POOLS + ONE, "--set=monitor.enabled=true"]
    good += ["--set=scaling.by=keda", "--set=scaling.prometheus=http://prometheus:9090"]
    done = run_helm("template", RELEASE, CHART, *good)
    assert done.returncode == 0, done.stderr
    bad = run_helm("template", RELEASE, CHART, *good, *set_)
    assert bad.returncode != 0
    assert message in bad.stderr


@pytest.mark.parametrize(
    ("set_", "router", "worker"),
    [
        ([], [], []),
        (["secretEnv=all"], ["all"], ["all"]),
        (["router.secretEnv=doors"], ["doors"], []),
        (["secretEnv=all", "pools[0].secretEnv=own"], ["all"], ["all", "own"]),
    ],
)
def test_secrets_become_variables(set_: list[str], router: list[str], worker: list[str]) -> None:
    """The nearer one comes last, so its keys win."""
    more = ["--set=model=demo", POOLS + ONE, *(f"--set={one}" for one in set_)]
    given = dict(pods(manifests(CHART / "values.yaml", *more)))
    for name, wanted in ((f"{RELEASE}-router", router), (f"{RELEASE}-all", worker)):
        (container,) = given[name]["spec"]["containers"]
        assert container.get("envFrom", []) == [{"secretRef": {"name": one}} for one in wanted]


@pytest.mark.parametrize("port", [0, 50052])
def test_the_fast_door_is_open_where_the_values_name_a_port(port: int) -> None:
    more = ["--set=model=demo", POOLS + ONE, f"--set=router.fastPort={port}"]
    made = manifests(CHART / "values.yaml", *more)
    (container,) = dict(pods(made))[f"{RELEASE}-router"]["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env.get("BATON_FAST_LISTEN") == (f"0.0.0.0:{port}" if port else None)
    named = {(one["kind"], one["metadata"]["name"]): one["spec"] for one in made if "spec" in one}
    service = named["Service", f"{RELEASE}-router"]["ports"]
    policy = named["NetworkPolicy", f"{RELEASE}-router"]["ingress"][0]["ports"]
    ports = {50051, 8000} | {port} - {0}
    assert {one["containerPort"] for one in container["ports"]} == ports | {50050, 9090}
    assert {one["port"] for one in service} == ports == {one["port"] for one in policy}


@pytest.mark.parametrize("seconds", [0, 7])
def test_a_drain_is_as_long_as_the_values_say(
    seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--set=model=demo", POOLS + ONE]
    more += [f"--set={one}.drainSeconds={seconds}" for one in ("router", "pools[0]")]
    for name, pod in pods(manifests(CHART / "values.yaml", *more)):
        (container,) = pod["spec"]["containers"]
        assert {"name": "BATON_DRAIN_S", "value": str(seconds)} in container["env"]
        with monkeypatch.context() as patch:
            _check_pod(name, pod["spec"], patch)


@pytest.mark.parametrize(("pp", "tp"), [(1, 4), (2, 2), (4, 1)])
def test_hosts_of_a_worker_run_the_same(pp: int, tp: int) -> None:
    """But for the ports and probes of the leader, which is the worker for routers."""
    more = ["--set=model=demo", SPREAD.replace('"pp": 2', f'"pp": {pp}')]
    found = dict(pods(manifests(CHART / "values.yaml", *more)))
    leader, agent = found[f"{RELEASE}-a"], found[f"{RELEASE}-a{AGENT}"]
    (container,) = leader["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert (env["BATON_PP"], env["BATON_TP"]) == (str(pp), str(tp))
    assert env["BATON_NAME"] == f"{RELEASE}-a-$(GROUP)"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    for name in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
        del container[name]
    assert leader == agent


def test_compose_has_the_settings_of_the_chart() -> None:
    """But for those that a pod's place makes, and those of several hosts."""
    found, more = services(), ["--set=traces=http://jaeger:4317"]
    pods_ = pods(manifests(KUBERNETES / "values" / "two-pools.yaml", *more))
    for keeper, pod in pods_:
        (container,) = pod["spec"]["containers"]
        given = {one["name"] for one in container["env"] if one["name"].startswith("BATON_")}
        other = found[keeper.removeprefix(f"{RELEASE}-")]["environment"]
        assert given - {"BATON_NAME", "BATON_ADVERTISE"} <= set(other)
        assert {"HF_TOKEN", "BATON_DRAIN_S"} <= set(other)


@pytest.mark.parametrize(("rdma", "added"), [("", []), ("rdma/hca", ["IPC_LOCK"])])
def test_rdma_may_pin_memory_and_nobody_else(rdma: str, added: list[str]) -> None:
    more = ["--set=model=demo", POOLS + ONE, "--set=pools[0].gpus=2", f"--set=pools[0].rdma={rdma}"]
    (container,) = dict(pods(manifests(CHART / "values.yaml", *more)))[f"{RELEASE}-all"]["spec"][
        "containers"
    ]
    limits = container["resources"]["limits"]
    assert limits == {"memory": "16Gi", "nvidia.com/gpu": 2} | ({rdma: 1} if rdma else {})
    capabilities = container["securityContext"]["capabilities"]
    assert (capabilities["drop"], capabilities.get("add", [])) == (["ALL"], added)


@pytest.mark.parametrize(
    ("replicas", "traces", "endpoint"),
    [
        (1, "", f"grpcs://{RELEASE}-routers:50050"),
        (2, "", None),  # each would have a part
        (1, "http://jaeger:4317", "http://jaeger:4317"),
        (2, "http://jaeger:4317", "http://jaeger:4317"),
    ],
)
def test_where_spans_go_and_who_may_be_evicted(
    replicas: int, traces: str, endpoint: str | None
) -> None:
    more = ["--set=model=demo", POOLS + ONE, f"--set=router.replicas={replicas},traces={traces}"]
    made = manifests(CHART / "values.yaml", *more)
    for _, pod in pods(made):
        (container,) = pod["spec"]["containers"]
        env = {one["name"]: one.get("value") for one in container["env"]}
        assert env.get("BATON_OTLP_ENDPOINT") == endpoint
    budgets = {
        one["metadata"]["name"]: one["spec"] for one in made if one["kind"] == "PodDisruptionBudget"
    }
    assert budgets[f"{RELEASE}-all"]["maxUnavailable"] == 1
    assert (f"{RELEASE}-router" in budgets) == (replicas > 1)
    kept = [pod for name, pod in pods(made) if name == f"{RELEASE}-all"]
    selector = budgets[f"{RELEASE}-all"]["selector"]["matchLabels"].items()
    assert all(selector <= pod["metadata"]["labels"].items() for pod in kept)
