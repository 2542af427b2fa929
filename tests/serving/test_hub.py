"""Models by their id, from a hub over HTTP: fetched once, and three ways not to get one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import Asked, Reply, http_server
from tiny_models import write_tiny_model

from serving.models import finding, hub

SHA = "0123456789abcdef0123456789abcdef01234567"
GATED, PRIVATE, MODEL = "org/gated", "org/private", "org/tiny"
TOKEN = "hf_secret"


class Hub:
    """Serves one folder as three models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.asked: list[str] = []
        self.url = ""

    def files(self) -> list[Path]:
        return [path for path in sorted(self.folder.rglob("*")) if path.is_file()]

    def __call__(self, asked: Asked) -> Reply:
        path = asked.path.partition("?")[0]
        self.asked.append(path)
        model = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        is_known = asked.headers.get("authorization") == f"Bearer {TOKEN}"
        if model not in (GATED, PRIVATE, MODEL) or (model == PRIVATE and not is_known):
            return Reply(b"", 401 if not is_known else 404, {"x-error-code": "RepoNotFound"})
        if path.endswith("/revision/nothing"):
            return Reply(b"", 404, {"x-error-code": "RevisionNotFound"})
        if "/tree/" in path:
            return self._json([self._entry(file) for file in self.files()])
        if path.startswith("/api/models"):
            return self._json(
                {"id": model, "sha": SHA, "siblings": [], "private": model == PRIVATE}
            )
        if model == GATED and not is_known:
            return Reply(b"", 401, {"x-error-code": "GatedRepo"})
        return self._file(asked, path.partition(f"/resolve/{SHA}/")[2])

    def _entry(self, file: Path) -> dict[str, object]:
        name = str(file.relative_to(self.folder))
        return {"type": "file", "path": name, "size": file.stat().st_size, "oid": name}

    def _file(self, asked: Asked, name: str) -> Reply:
        if asked.method == "GET":
            self.fetched.append(name)
        headers = {"etag": f'"{name}"', "x-repo-commit": SHA}
        return Reply((self.folder / name).read_bytes(), 200, headers)

    def _json(self, content: object) -> Reply:
        return Reply(json.dumps(content).encode(), 200, {"content-type": "application/json"})


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = Path(write_tiny_model(tmp_path / "source"))
    for name in ("consolidated.safetensors", "onnx/model.safetensors", "x.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("twice")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    hub = Hub(folder)
    with http_server(hub) as address:
        hub.url = f"http://{address}"
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_a_model_is_fetched_once_with_nothing_twice(served: Hub) -> None:
    told: list[tuple[str, float | None]] = []
    found = finding.find(MODEL, lambda *report: told.append(report))
    assert found.name == "tiny"
    got = {path.name for path in Path(found.path).rglob("*")}
    assert got >= {"config.json", "model.safetensors"}
    assert not got & {"consolidated.safetensors", "onnx", "x.bin"}
    assert told[-1] == (f"fetching {MODEL}", 1.0)
    fetched = list(served.fetched)
    assert finding.find(MODEL) == found
    assert served.fetched == fetched, "it was there"


def test_a_revision_is_pinned(served: Hub) -> None:
    found = finding.find(f"{MODEL}@{SHA}")
    assert found.name == "tiny"
    assert Path(found.path).name == SHA
    assert f"/api/models/{MODEL}/tree/{SHA}" in served.asked
    finding.find(f"{MODEL}@v1")
    assert f"/api/models/{MODEL}/revision/v1" in served.asked
    with pytest.raises(hub.HubError, match="has the model, and not this revision"):
        finding.find(f"{MODEL}@nothing")


def test_without_weights_there_are_none(served: Hub) -> None:
    found = finding.find(MODEL, weights=False)
    assert not list(Path(found.path).glob("*.safetensors"))


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_gated_model_and_a_private_one(
    served: Hub, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
        assert finding.find(GATED).name == "gated"
        assert finding.find(PRIVATE).name == "private"
        return
    with pytest.raises(hub.HubError, match=rf"is gated: ask for access at {served.url}/{GATED}"):
        finding.find(GATED)
    with pytest.raises(hub.HubError, match="not found or private: set HF_TOKEN if it is private"):
        finding.find(PRIVATE)


def test_a_model_that_is_not_there(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(hub.HubError, match=r"org/none is no folder here.*not found or private"):
        finding.find("org/none")
    with pytest.raises(hub.HubError, match="'/no/such/folder' is no folder, no GGUF file and no"):
        finding.find("/no/such/folder")


def test_without_a_network_the_cache_serves(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding.find(MODEL)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert finding.find(MODEL) == found
    with pytest.raises(hub.HubError, match=r"not in the cache, and the hub .*cannot be reached"):
        finding.find("org/other")
