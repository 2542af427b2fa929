"""A GPU belongs to one worker until that worker's process has ended, however it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from serving import gpu_slots
from serving.gpu_slots import NoSlotError, claimed, claimed_for, visible_gpus

HOLDER = """
import signal, sys
from pathlib import Path
from serving.gpu_slots import NoSlotError, claimed
folder, holder, *gpus = sys.argv[1:]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
try:
    with claimed(Path(folder), gpus, holder) as gpu:
        print(gpu, flush=True)
        signal.pause()
except NoSlotError as error:
    print(error, flush=True)
"""
GPUS = ("0", "1", "2")

Start = Callable[[str], tuple[subprocess.Popen[str], str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that claims; returns it and what it says."""
    processes: list[subprocess.Popen[str]] = []

    def run(holder: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "slots"), holder, *GPUS]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def test_each_process_gets_a_gpu_of_its_own_and_the_last_a_clear_no(start: Start) -> None:
    assert [start(f"decode-{i}")[1] for i in range(3)] == list(GPUS)
    assert start("decode-3")[1] == (
        "no GPU is left here for decode-3: claimed are 0 by decode-0, 1 by decode-1, 2 by decode-2"
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_slot_is_free_when_its_holder_has_ended(start: Start, number: signal.Signals) -> None:
    holders = [start(f"decode-{i}")[0] for i in range(3)]
    holders[1].send_signal(number)
    holders[1].wait(10)
    assert start("decode-3")[1] == "1"
    assert "1 by decode-3" in start("decode-4")[1]


def test_a_stopped_holder_keeps_its_slot(start: Start) -> None:
    holders = [start(f"decode-{i}")[0] for i in range(3)]
    holders[0].send_signal(signal.SIGSTOP)
    assert start("late")[1].startswith("no GPU is left")


def test_many_who_start_at_once_never_share(start: Start) -> None:
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: said.append(start(f"w-{i}")[1])) for i in range(5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(word for word in said if word in GPUS) == list(GPUS)
    assert len(said) == 5


def test_within_a_process_the_slot_ends_with_the_block(tmp_path: Path) -> None:
    with claimed(tmp_path, ["0"], "one"), pytest.raises(NoSlotError, match="0 by one"):
        claimed(tmp_path, ["0"], "two").__enter__()
    with claimed(tmp_path, ["0"], "two") as gpu:
        assert gpu == "0"


def test_the_claimed_gpu_is_the_only_one_that_the_process_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5e8c")
    with (
        claimed_for("cuda", str(tmp_path), "one") as first,
        monkeypatch.context() as patched,
    ):
        assert (first, visible_gpus()) == ("4", ["4"])
        patched.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-5e8c")
        with claimed_for("auto", str(tmp_path), "two") as second:
            assert (second, visible_gpus()) == ("GPU-5e8c", ["GPU-5e8c"])


def test_a_worker_of_several_ranks_claims_a_gpu_for_each_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = ["0", "1", "2", "3"]
    with claimed(tmp_path, gpus, "one", 2) as first, claimed(tmp_path, gpus, "two") as second:
        assert (first, second) == ("0,1", "2")
        with pytest.raises(NoSlotError, match=r"1 of 2 GPUs are left here for three: .* 2 by two"):
            claimed(tmp_path, gpus, "three", 2).__enter__()
        with claimed(tmp_path, gpus, "four") as left:
            assert left == "3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    with claimed_for("cuda", str(tmp_path), "one", 2) as both:
        assert (both, visible_gpus()) == ("4,5", ["4", "5"])


def test_of_two_workers_that_choose_at_once_one_gets_what_both_want(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They see the GPUs in different orders. Each stands still behind its first one, until the
    other has one, too, or does not come."""
    both, ended, locks = threading.Barrier(2), threading.Barrier(2), gpu_slots._lock
    said: list[str] = []

    def lock(file: IO[str]) -> bool:
        found = locks(file)
        if "gpu-" in os.readlink(f"/proc/self/fd/{file.fileno()}"):
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)
        return found

    def choose(holder: str, gpus: list[str]) -> None:
        try:
            with claimed(tmp_path, gpus, holder, 2) as own:
                said.append(own)
                ended.wait(30)
        except NoSlotError:
            said.append("none")
            ended.wait(30)

    monkeypatch.setattr(gpu_slots, "_lock", lock)
    workers = [("one", ["0", "1"]), ("two", ["1", "0"])]
    threads = [threading.Thread(target=choose, args=each) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(said) in (["0,1", "none"], ["1,0", "none"])


def test_a_worker_that_never_ends_choosing_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_slots, "CHOOSING_S", 0.05)
    refused = pytest.raises(NoSlotError, match="another worker has been choosing")
    with gpu_slots._choosing(tmp_path), refused:
        claimed(tmp_path, ["0"], "late").__enter__()
    with claimed(tmp_path, ["0"], "later") as gpu:
        assert gpu == "0"


@pytest.mark.parametrize(
    ("device", "folder", "gpus"), [("cpu", "slots", "0"), ("auto", "slots", ""), ("cuda", "", "0")]
)
def test_nothing_is_claimed_where_nothing_is_to_be(
    device: str, folder: str, gpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    slots = tmp_path / folder if folder else ""
    with claimed_for(device, str(slots), "one") as gpu:
        assert gpu == ""
    assert visible_gpus() == [name for name in [gpus] if name]
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NoSlotError, match="no GPU is visible here for one"):
        claimed_for("cuda", str(tmp_path), "one").__enter__()
    (tmp_path / "file").write_text("")
    with pytest.raises(NoSlotError, match="cannot be used"):
        claimed(tmp_path / "file", ["0"], "one").__enter__()
