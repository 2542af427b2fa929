"""A worker's commands about adapters: they read what lies in its folder, and hold up nothing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from baton.worker.v1 import worker_pb2
from engine.adapters.registry import Adapters
from engine.adapters.types import Adapter, AdapterError
from engine.model.adapters.config import open_within
from engine.model.adapters.reading import Limits, read_adapter
from worker_base import adapters as service
from worker_base.adapters import AdapterService, below
from worker_base.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of adapters, beside a secret."""
    law = tmp_path / "adapters" / "law"
    law.mkdir(parents=True)
    for name in FILES:
        (law / name).write_text("{}")
        (tmp_path / name).write_text("secret")
    return law.parent.resolve()


def to_link(path: Path, to: Path) -> Callable[[], None]:
    def swap() -> None:
        path.rename(path.with_name("moved"))
        path.symlink_to(to)

    return swap


@pytest.mark.parametrize("name", FILES)
def test_a_link_that_comes_after_the_look_is_not_followed(name: str, root: Path) -> None:
    found, within = below(str(root), "law")
    to_link(found / name, root.parent / name)()
    with pytest.raises(AdapterError, match="lies outside of"):
        open_within(found / name, within)
    with pytest.raises(AdapterError, match=r"lies outside of|target_modules|peft_type"):
        read_adapter(found, {}, Limits(8, 100), torch.float32, within)
    with open_within(found / name, None) as opened:
        assert opened.read() == b"secret"


@pytest.mark.parametrize("swapped", ["law", "law/adapter_config.json"])
def test_nor_one_that_comes_between_look_and_opening(
    swapped: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = root.parent if swapped == "law" else root.parent / FILES[0]
    look, swap = Path.resolve, to_link(root / swapped, to)

    def and_then(path: Path, *, strict: bool = False) -> Path:
        real = look(path, strict=strict)
        swap()
        return real

    monkeypatch.setattr(Path, "resolve", and_then)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        open_within(root / "law" / FILES[0], root)


def test_links_within_the_folder_are_read(root: Path) -> None:
    """As a hub's cache has them."""
    blob = root / "blob"
    (root / "law" / FILES[0]).rename(blob)
    (root / "law" / FILES[0]).symlink_to("../blob")
    (root / "new").symlink_to("law")
    found, within = below(str(root), "new")
    with open_within(found / FILES[0], within) as opened:
        assert opened.read() == b"{}"


async def test_the_folder_is_looked_through_beside_the_loop(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def look(folder: str, path: str) -> tuple[Path, Path]:
        looked.append(threading.current_thread())
        return below(folder, path)

    def read(folder: Path, within: Path | None) -> Adapter:
        assert (folder, within) == (root / "law", root)
        return Adapter(b"1" * 32, {}, 8, "")

    monkeypatch.setattr(service, "below", look)
    outbox = Outbox(lambda: None)
    served = AdapterService(Adapters(read, 1 << 20), str(root), lambda _: None)
    served.load(worker_pb2.LoadAdapter(call_id=b"a", name="law", path="law"), outbox)
    async with asyncio.timeout(10):
        message = await outbox.get()
    assert message is not None
    assert (message.adapter_done.digest, message.adapter_done.error) == (b"1" * 32, "")
    assert looked != [threading.main_thread()]
