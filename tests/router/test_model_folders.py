"""Where a router reads tokenizers: below the folders of its operator, whatever a worker says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from frontdoor_kit import write_tokenizer
from router_kit import ANY, a_router, announce
from scripted_worker import BOTH, ScriptedWorker, until

from baton.worker.v1 import worker_pb2
from router.requests.tokenization import Tokenizer
from router.workers.model_folders import AllowedFolders, AnyFolder


def model(path: object, name: str = "tiny") -> worker_pb2.ModelInfo:
    return worker_pb2.ModelInfo(name=name, path=str(path))


def test_an_announced_folder_must_lie_below_an_allowed_one(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    os.symlink(tmp_path / "secret", tmp_path / "models" / "link")
    folders = AllowedFolders([str(tmp_path / "models")])
    assert folders.find(model(tmp_path / "models" / "tiny", "x")) == str(tmp_path / "models/tiny")
    for path in (
        tmp_path / "secret",
        tmp_path / "models" / ".." / "secret",
        tmp_path / "models" / "link",
        tmp_path / "models" / "nothing",
        tmp_path,
        "/",
        "",
        "a" * 10_000,
        "models/tiny",
    ):
        assert folders.find(model(path, "x")) == "", path


def test_a_model_is_found_by_its_name(tmp_path: Path) -> None:
    """Where worker and router have it at different places."""
    for name in ("tiny", "org/tiny"):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    folders = AllowedFolders([str(tmp_path / "other"), str(tmp_path / "models")])
    assert folders.find(model("/elsewhere/tiny")) == str(tmp_path / "models/tiny")
    assert folders.find(model("/elsewhere", "org/tiny")) == str(tmp_path / "models/org/tiny")
    for name in ("../secret", "..", "/etc", str(tmp_path / "secret"), "x\0y"):
        assert folders.find(model("/elsewhere", name)) == "", name


def test_no_folder_means_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the working directory's."""
    write_tokenizer(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert Tokenizer.load(str(tmp_path)) is not None
    assert Tokenizer.load("") is None


@pytest.mark.parametrize(
    ("settings", "believed"),
    [
        ({}, True),
        ({"model_dirs": ("/nowhere",)}, False),
        ({"internal_listen": "0.0.0.0:0", "insecure": True}, False),
    ],
    ids=["on loopback", "with folders", "open to others"],
)
async def test_a_worker_is_believed_on_loopback_alone(
    tmp_path: Path, settings: dict[str, object], believed: bool
) -> None:
    write_tokenizer(tmp_path)
    async with a_router(**{"internal_listen": ANY, **settings}) as router:
        worker = ScriptedWorker("b0", BOTH)
        worker.identity.model.path = str(tmp_path)
        await worker.start()
        await announce(router, worker.identity)
        await until(router.dispatcher.attached_models)
        (served,) = router.dispatcher.attached_models()
        assert served.path == (str(tmp_path) if believed else "")
        await worker.stop()


def test_any_folder_believes() -> None:
    assert AnyFolder().find(model("/x")) == "/x"
