"""Contents that are read again into host memory, from folders that cannot be read for a while."""

from __future__ import annotations

import errno
import logging
import threading
from pathlib import Path

import pytest
from adapters_kit import adapter, write_adapter
from engine_kit import build, check_baseline, finish, submit
from paths_kit import prompt_of
from safetensors.torch import load_file
from tiny_models import write_tiny_model

from engine.adapters import registry
from engine.adapters.registry import Adapters
from engine.adapters.types import AdapterError, AdapterUnreadError
from engine.model.adapters import config, reading
from engine.types import FailureReason

FILES = {"config": config.CONFIG, "tensors": reading.TENSORS}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), tokenizer=False)


@pytest.mark.parametrize(
    ("lost", "cause"),
    [("config", "ENOENT"), ("tensors", "a file is missing"), ("EIO", "EIO"), ("EMFILE", "EMFILE")],
)
def test_the_name_stays(path, tmp_path, monkeypatch, caplog, lost, cause):
    """Those who wait fail; who comes a moment later fails at once; and then it is read again."""
    monkeypatch.setattr(registry, "REST_S", 600.0)
    one, other = (write_adapter(path, tmp_path / str(i), i) for i in range(2))
    size = sum(each.numel() * 4 for each in load_file(one / reading.TENSORS).values())
    engine = build(path, max_adapters=1, adapters_host_bytes=int(1.5 * size))
    engine.adapters.on_gone = lambda: pytest.fail("no name is gone")

    def fails() -> None:
        run = submit(engine, prompt_of(20), 6, adapter=first)
        assert run.done.wait(30)
        assert run.failed is not None
        assert run.failed.reason is FailureReason.ADAPTER

    def no_file(*_):
        raise OSError(getattr(errno, lost), "no", "/secret")

    try:
        first = engine.adapters.load("one", one).digest
        want = submit(engine, prompt_of(20), 6, adapter=first, ignore_eos=True)
        finish(want)
        engine.adapters.load("other", other)
        assert engine.adapters.in_host != (first,)
        with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
            if lost not in FILES:
                broken.setattr(config if lost == "EIO" else reading, "open_within", no_file)
            else:
                (one / FILES[lost]).rename(one / "away")
            fails()
            assert f"adapter one cannot be read now: {cause}" in caplog.text
            fails()
            assert caplog.text.count("cannot be read now") == 1, "it was tried again at once"
            assert str(one) not in caplog.text
            assert "secret" not in caplog.text
        if (one / "away").exists():
            (one / "away").rename(one / FILES[lost])
        assert [info.name for info in engine.adapters.named()] == ["one", "other"]
        monkeypatch.setattr(registry, "REST_S", 0.0)
        again = submit(engine, prompt_of(20), 6, adapter=first, ignore_eos=True)
        finish(again)
        assert again.tokens == want.tokens
        check_baseline(engine)
        assert engine.adapters.held == 0
    finally:
        engine.stop()


def test_loaded_from_another_place_and_changed():
    """A load of the same content says where it is read from now on; a folder with another content
    drops the name, also behind a time in which it could not be read."""
    places: dict[str, int | Exception] = {"a": 1, "b": 1, "c": 2}

    def read(path: Path, _: Path | None):
        if isinstance(found := places[path.name], Exception):
            raise found
        return adapter(found)

    def tried() -> object:
        held = adapters.hold(digest)
        assert held is not None
        error = held.exception(30)
        adapters.release(digest, held)
        return error

    adapters = Adapters(read, adapter(0).num_bytes)
    digest = adapters.load("name", Path("a")).digest
    adapters.load("other", Path("c"))
    places["a"] = MemoryError("secret")
    assert isinstance(tried(), AdapterUnreadError)
    assert adapters.load("name", Path("b")).path == "b"
    adapters.load("other", Path("c"))
    assert tried() is None
    adapters.load("other", Path("c"))
    places["b"] = 3
    error = tried()
    assert isinstance(error, AdapterError)
    assert not isinstance(error, AdapterUnreadError)
    assert [info.name for info in adapters.named()] == ["other"]
    assert adapters.hold(digest) is None


def test_a_request_that_is_cancelled_while_its_content_is_found_gone():
    """It is let go of once."""
    places, may_read = {"a": 1, "b": 2}, threading.Event()

    def read(path: Path, _: Path | None):
        assert may_read.wait(30)
        return adapter(places[path.name])

    adapters = Adapters(read, adapter(0).num_bytes)
    may_read.set()
    digest = adapters.load("name", Path("a")).digest
    adapters.load("other", Path("b"))
    places["a"] = 3
    may_read.clear()
    held = adapters.hold(digest)
    assert held is not None
    adapters.on_gone = lambda: adapters.release(digest, held)
    may_read.set()
    assert isinstance(held.exception(30), AdapterError)
    assert adapters.held == 0
    assert digest not in adapters._users


def test_nothing_is_dropped_for_what_finds_no_room():
    """While requests hold the rest, a large one that is loaded takes the place of none."""
    rows = [4, 8, 16]
    adapters = Adapters(lambda path, _: adapter(int(path.name), rows[int(path.name)]), 20 * 8)
    small, taken = (adapters.load(str(number), Path(str(number))).digest for number in range(2))
    held = adapters.hold(taken)
    assert held is not None
    large = adapters.load("2", Path("2")).digest
    assert adapters.in_host == (taken, small)
    adapters.release(taken, held)
    adapters.load("2", Path("2"))
    assert adapters.in_host == (large,)
