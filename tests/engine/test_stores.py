"""Stores: what comes back, what is damaged, foreign or lost, and the child process."""

from __future__ import annotations

import errno
import mmap
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from waiting import wait_until

from engine.tiers.arena import HostArena
from engine.tiers.stores.disk import DiskStore
from engine.tiers.stores.folder import FolderStore
from engine.tiers.stores.messages import LOAD, LOOKUP, STORE, Opening
from engine.tiers.stores.objects import HEADER_BYTES, ObjectForm, read_secret
from engine.tiers.stores.opening import open_store
from engine.tiers.stores.process import Job, StoreProcess
from engine.tiers.stores.protocol import StoreError

SLOT = 4096
PAGES = 4
FORM = ObjectForm("f" * 32, (0, 8), PAGES, SLOT)
SIGNED = ObjectForm("f" * 32, (0, 8), PAGES, SLOT, b"k" * 32)
OBJECT = FORM.object_bytes


def parts(fill: int | None = None) -> list[memoryview]:
    """An object's buffers, with a page of random bytes if no byte is named."""
    found = [memoryview(mmap.mmap(-1, size)) for size in (HEADER_BYTES, *[SLOT] * PAGES)]
    for part in found:
        part[:] = os.urandom(len(part)) if fill is None else bytes([fill]) * len(part)
    return found


def sealed(form: ObjectForm, key: bytes) -> tuple[str, list[memoryview]]:
    buffers, name = parts(), form.name(key)
    form.seal(name, buffers)
    return name, buffers


def same(one: list[memoryview], other: list[memoryview]) -> bool:
    return all(bytes(a) == bytes(b) for a, b in zip(one, other, strict=True))


def make(kind: str, folder, objects: int = 4):
    return {"disk": DiskStore, "dir": FolderStore}[kind](str(folder), objects * OBJECT, OBJECT)


@pytest.mark.parametrize("form", [FORM, SIGNED], ids=["xxh3", "blake3"])
def test_any_difference_shows(form):
    name, whole = sealed(form, b"a" * 32)
    assert form.is_whole(name, whole)
    for part, at in ((0, 3), (0, 9), (0, 30), (0, 60), (1, 0), (PAGES, SLOT - 1)):
        whole[part][at] ^= 1
        assert not form.is_whole(name, whole), (part, at)
        whole[part][at] ^= 1
    for other in (
        ObjectForm("g" * 32, (0, 8), PAGES, SLOT, form.secret),
        ObjectForm("f" * 32, (0, 4), PAGES, SLOT, form.secret),
        ObjectForm("f" * 32, (0, 8), PAGES, SLOT, b"other" * 6 + b"xx"),
    ):
        assert not other.is_whole(other.name(b"a" * 32), whole)
    assert not form.is_whole(form.name(b"b" * 32), whole)


@pytest.mark.parametrize("kind", ["disk", "dir"])
def test_objects_come_back_also_after_a_restart(kind, tmp_path):
    store = make(kind, tmp_path)
    written = dict(sealed(FORM, bytes([i]) * 32) for i in range(3))
    assert store.store(list(written), list(written.values())) == [True] * 3
    missing = FORM.name(b"x" * 32)
    for _ in range(2):
        assert store.lookup([missing, *written]) == [False, True, True, True]
        read = [parts(0) for _ in range(4)]
        assert store.load([missing, *written], read) == [False, True, True, True]
        assert all(same(a, b) for a, b in zip(read[1:], written.values(), strict=True))
        store.close()
        store = make(kind, tmp_path)
    store.remove([next(iter(written))])
    assert store.lookup(list(written)) == [False, True, True]
    store.close()


@pytest.mark.parametrize("kind", ["disk", "dir"])
def test_a_store_keeps_its_size(kind, tmp_path):
    store = make(kind, tmp_path, objects=4)
    names = []
    for i in range(12):
        name, buffers = sealed(FORM, bytes([i]) * 32)
        assert store.store([name], [buffers]) == [True]
        names.append(name)
        time.sleep(0.01)
    found = store.lookup(names)
    assert 0 < sum(found) <= 4
    assert found[-1], "the newest went before older ones"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and "index" not in path.name]
    assert sum(path.stat().st_size for path in files) <= 4 * OBJECT
    store.close()


def test_a_folder_store_touches_nothing_but_its_own_files(tmp_path):
    store, elsewhere = make("dir", tmp_path / "new"), tmp_path / "elsewhere"
    name, buffers = sealed(FORM, b"k" * 32)
    assert store.store([name], [buffers]) == [True]
    file = tmp_path / "new" / name[-2:] / name
    modes = [path.stat().st_mode & 0o777 for path in (file.parent.parent, file.parent, file)]
    assert modes == [0o700, 0o700, 0o600]
    elsewhere.mkdir()
    (elsewhere / "victim").write_bytes(bytes(9 * OBJECT))
    (elsewhere / name).write_bytes(b"".join(buffers))
    makes = {
        "folder": file.mkdir,
        "loop": lambda: file.symlink_to(file),
        "link": lambda: file.symlink_to(elsewhere / name),
        "pipe": lambda: os.mkfifo(file),
    }
    for what, put in makes.items():
        store.remove([name])
        put()
        assert store.lookup([name]) == [False], what
        assert store.load([name], [parts()]) == [False], what
        assert store.store([name], [buffers]) == [what != "folder"], "a name is replaced"
        if what == "folder":
            file.rmdir()
    shutil.rmtree(file.parent)
    file.parent.symlink_to(elsewhere)
    assert store.lookup([name]) == store.load([name], [parts()]) == [False]
    assert store.store([name], [buffers]) == [False]
    store.remove([name])
    store._until_counted = 0
    store._make_room()
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted([name, "victim"])
    store.close()


@pytest.mark.parametrize("kind", ["disk", "dir"])
def test_a_folder_that_cannot_be_made_is_named_once(kind, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=rf"^{kind}:{tmp_path}/file/kv: Not a directory$"):
        make(kind, tmp_path / "file/kv")


def test_a_disk_belongs_to_one_process_and_forgets_objects_of_another_size(tmp_path):
    store = make("disk", tmp_path)
    with pytest.raises(StoreError, match="in use by another process"):
        make("disk", tmp_path)
    name, buffers = sealed(FORM, b"a" * 32)
    store.store([name], [buffers])
    store.close()
    other = DiskStore(str(tmp_path), 4 * OBJECT, OBJECT + SLOT)
    assert other.lookup([name]) == [False]
    other.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tape:/x", "no store of this kind; there are .*disk.*mooncake"),
        ("disk:/tmp/x", "its size is missing"),
        ("disk:/tmp/x?gib=1&speed=2", "the form is"),
        ("disk:/proc/no?gib=1", "/proc/no"),
        ("dir:/proc/no?gib=1", "/proc/no"),
        ("disk:/tmp/baton-none?gib=0.0000001", "hold no object"),
    ],
)
def test_a_store_that_cannot_be_is_named(address, message):
    with pytest.raises(StoreError, match=message):
        open_store(address, SIGNED)


def test_a_store_that_others_can_write_wants_a_secret(tmp_path):
    with pytest.raises(StoreError, match="kv_secret_file"):
        open_store(f"dir:{tmp_path}?gib=1", FORM)
    secret = tmp_path / "secret"
    secret.write_text("short")
    with pytest.raises(StoreError, match="fewer than 16 bytes"):
        read_secret(str(secret))
    secret.write_text("x" * 40)
    assert len(read_secret(str(secret))) == 32
    with pytest.raises(StoreError, match="No such file"):
        read_secret(str(tmp_path / "none"))


def test_a_full_disk_is_an_error_and_leaves_the_store_as_it_was(tmp_path, monkeypatch):
    for kind, call in (("disk", "pwritev"), ("dir", "writev")):
        store = make(kind, tmp_path / kind)
        name, buffers = sealed(FORM, b"a" * 32)

        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OSError, match="No space"):
                store.store([name], [buffers])
        assert store.lookup([name]) == [False]
        assert store.store([name], [buffers]) == [True]
        store.close()


def test_the_store_of_the_page_is_a_store():
    page = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 40
    names: dict = {}
    exec(code, names)
    store = names["make"]("memory:2", OBJECT)
    written = dict(sealed(FORM, bytes([i]) * 32) for i in range(3))
    assert store.store(list(written), list(written.values())) == [True] * 3
    assert store.lookup(list(written)) == [False, True, True]
    read = [parts(0) for _ in range(3)]
    assert store.load(list(written), read) == [False, True, True]
    assert all(FORM.is_whole(name, one) for name, one in list(zip(written, read, strict=True))[1:])
    store.remove(list(written))
    assert store.lookup(list(written)) == [False] * 3
    store.close()


class Ends:
    """A store's process over an arena of 32 slots for each rank, and the ends of its jobs."""

    def __init__(
        self,
        address: str,
        secret_file: str = "",
        failpoints: str = "",
        stuck_s: float = 10.0,
        heads: Sequence[tuple[int, int]] = ((0, 8),),
        pages: int = PAGES,
    ) -> None:
        self.pages = pages
        self.arenas = [HostArena(32 * SLOT, SLOT, torch.device("cpu")) for _ in heads]
        self.arena = self.arenas[0]
        self.done = queue.SimpleQueue()
        fds = [arena.fd for arena in self.arenas]
        opening = Opening(
            address, fds, 32, SLOT, "f" * 32, list(heads), pages, secret_file, failpoints
        )
        self.process = StoreProcess(opening, self.done, stuck_s)

    def ask(self, verb: str, keys: list[bytes], first_slot: int = 1) -> Job:
        slots = np.arange(first_slot, first_slot + self.pages * len(keys), dtype=np.int32)
        job = Job(verb, keys, [] if verb == LOOKUP else np.split(slots, len(keys)))
        assert self.process.ask(job)
        return job

    def end(self, timeout_s: float = 30.0) -> Job:
        _, job = self.done.get(timeout=timeout_s)
        self.process.settle(job)
        return job

    def answer(self, verb: str, *keys: bytes, first_slot: int = 1) -> Job:
        job = self.ask(verb, list(keys), first_slot)
        assert self.end() is job
        return job


@pytest.fixture
def start():
    started: list[Ends] = []

    def begin(*arguments, **more) -> Ends:
        started.append(Ends(*arguments, **more))
        return started[-1]

    yield begin
    for ends in started:
        ends.process.stop()
        for arena in ends.arenas:
            arena.close()


A, B = b"a" * 32, b"b" * 32


def test_a_child_stores_slots_and_loads_them_into_others(start, tmp_path):
    ends = start(f"disk:{tmp_path}?gib=0.01")
    assert ends.process.bytes_per_s > 0
    slots = ends.arena.slots
    slots.copy_(torch.randint(0, 256, slots.shape, dtype=torch.uint8))
    assert ends.answer(LOOKUP, A, B).good == [False, False]
    assert ends.answer(STORE, A, B).good == [True, True]
    assert ends.answer(LOOKUP, A, b"c" * 32, B).good == [True, False, True]
    before = slots.clone()
    assert ends.answer(LOAD, B, b"c" * 32, first_slot=20).good == [True, False]
    assert torch.equal(slots[20:24], before[5:9])
    assert torch.equal(slots[:20], before[:20])
    assert torch.equal(slots[24:], before[24:])


def test_damaged_objects_are_misses_counted_and_removed(start, tmp_path):
    """Torn, flipped, truncated, and one that lies under another's name."""
    secret = tmp_path / "secret"
    secret.write_text("x" * 40)
    ends = start(f"dir:{tmp_path}/kv?gib=1", str(secret))
    keys = [bytes([i]) * 32 for i in range(5)]
    ends.arena.slots.random_(0, 256)
    assert ends.answer(STORE, *keys).good == [True] * 5
    torn, flipped, truncated, foreign, whole = (
        next((tmp_path / "kv").glob(f"??/*{key.hex()}")) for key in keys
    )
    os.truncate(torn, OBJECT // 2)
    os.truncate(torn, OBJECT)
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    os.truncate(truncated, OBJECT - 1)
    foreign.write_bytes(whole.read_bytes())
    answer = ends.answer(LOAD, *keys, first_slot=1)
    assert answer.good == [False] * 4 + [True]
    assert answer.damaged == 4
    assert ends.answer(LOOKUP, *keys).good == [False] * 4 + [True]


def test_a_child_that_is_closed_closes_its_store(start, tmp_path):
    """SQLite leaves its log behind where nobody has closed it."""
    ends = start(f"disk:{tmp_path}?gib=0.01")
    assert ends.answer(STORE, A).good == [True]
    assert (tmp_path / "index-wal").exists()
    ends.process.stop()
    assert not (tmp_path / "index-wal").exists()


@pytest.mark.parametrize("verb", [LOOKUP, LOAD, STORE])
def test_a_killed_child_fails_its_jobs_and_is_started_again(start, tmp_path, verb):
    ends = start(f"disk:{tmp_path}?gib=0.01", failpoints=f"store.{verb}=kill@2")
    first = ends.process.pid
    ends.answer(STORE, A)
    ends.answer(verb, A)
    if verb != STORE:
        job = ends.answer(verb, A)
        assert (job.failed, job.good) == (True, [False])
    wait_until(lambda: ends.process.pid != first and ends.process.ask(Job(LOOKUP, [A])))
    assert ends.end().good == [True]


def test_a_child_that_hangs_is_killed_and_its_slots_are_its_own_until_then(start, tmp_path):
    ends = start(f"disk:{tmp_path}?gib=0.01", failpoints="store.load=hang", stuck_s=1.0)
    hung = ends.process.pid
    job = ends.ask(LOAD, [A])
    with pytest.raises(queue.Empty):
        ends.done.get(timeout=0.3)
    assert ends.end() is job
    assert job.failed
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


def test_a_stopped_child_is_killed_too(start, tmp_path):
    ends = start(f"disk:{tmp_path}?gib=0.01", stuck_s=0.5)
    os.kill(ends.process.pid, signal.SIGSTOP)
    job = ends.ask(LOOKUP, [A])
    assert ends.end() is job
    assert job.failed


WORKER = """
import queue, sys, time, torch
from engine.tiers.arena import HostArena
from engine.tiers.stores.messages import Opening
from engine.tiers.stores.process import StoreProcess
arena = HostArena(32 * {slot}, {slot}, torch.device("cpu"))
opening = Opening(sys.argv[1], [arena.fd], 32, {slot}, "f" * 32, [(0, 8)], {pages}, "", "")
print(StoreProcess(opening, queue.SimpleQueue()).pid, flush=True)
time.sleep(60)
"""


def is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_stopped_child_ends_with_a_worker_that_is_killed_and_leaves_the_disk(start, tmp_path):
    address = f"disk:{tmp_path}?gib=0.01"
    code = WORKER.format(slot=SLOT, pages=PAGES)
    with subprocess.Popen([sys.executable, "-c", code, address], stdout=subprocess.PIPE) as worker:
        child = int(worker.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        worker.kill()
    wait_until(lambda: not psutil.pid_exists(child) or is_zombie(child), 5)
    assert start(address).answer(LOOKUP, A).good == [False]


def test_a_full_queue_takes_no_more(start, tmp_path):
    ends = start(f"disk:{tmp_path}?gib=0.01", failpoints="store.lookup=sleep:0.2@1")
    taken = sum(ends.process.ask(Job(LOOKUP, [A])) for _ in range(100))
    assert taken == 64
    for _ in range(taken):
        assert ends.end().good == [False]
    assert ends.answer(LOOKUP, A).good == [False]


def test_an_unknown_store_says_so_in_its_childs_words(start):
    with pytest.raises(StoreError, match="tape:x: no store of this kind"):
        start("tape:x")
