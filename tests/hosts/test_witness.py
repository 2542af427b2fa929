"""Who may say that a lost worker's processes have ended, and when its peers hear it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from baton.worker.v1 import worker_pb2
from kv_transfer.transports.processes import has_ended, process_of, this_host
from router.deaths import witness as witness_module_of_routers
from router.deaths.witness import ASKED_S, MOST_ENDED, MOST_LOST, MOST_WORKERS, Deaths
from worker.hosts import witness as witness_module
from worker.hosts.witness import Witness, looking

A, B = "boot/1", "boot/2"
GONE = "p-0000000000000007"
NO_NAMES = [
    f"{this_host()}/{pid}/{started}"
    for pid, started in [
        (1 << 31, 1),
        (1 << 22 | 1, 1),
        (-1, 1),
        (" 999999", 1),
        ("9" * 99, 1),
        (999_999, "1\n"),
        (999_999, "x"),
        (999_999, ""),
    ]
]
"""Nobody ever had such a number, or began then."""


def worker_of(*processes: str, epoch: int = 7) -> worker_pb2.WorkerIdentity:
    first, *others = (worker_pb2.KvEndpoint(process=process) for process in processes)
    first.agent_name = f"p-{epoch:016x}"
    first.ranks.extend(others)
    return worker_pb2.WorkerIdentity(worker_id="p", epoch=epoch, endpoint=first)


@pytest.fixture
def proven() -> list[str]:
    return []


@pytest.fixture
def deaths(proven: list[str]) -> Deaths:
    return Deaths(proven.append)


def test_peers_are_told_when_every_process_of_every_host_has_ended(
    deaths: Deaths, proven: list[str]
) -> None:
    deaths.lost(worker_of(f"{A}/5/1", f"{A}/6/1", f"{B}/5/1"))
    assert deaths.witness("p", A, ()) == [f"{A}/5/1", f"{A}/6/1"]
    assert deaths.witness("p", A, [f"{A}/5/1"]) == [f"{A}/6/1"]
    assert deaths.witness("p", A, [f"{A}/6/1"]) == []
    assert proven == []
    assert deaths.unproven[0]["processes"] == 1
    assert deaths.witness("p", B, [f"{B}/5/1"]) == []
    assert proven == [GONE]
    assert deaths.unproven == []


def test_word_may_come_before_the_loss_is_seen(deaths: Deaths, proven: list[str]) -> None:
    deaths.witness("p", B, [f"{B}/5/1"])
    deaths.lost(worker_of(f"{A}/5/1", f"{B}/5/1"))
    assert proven == []
    deaths.witness("p", A, [f"{A}/5/1"])
    assert proven == [GONE]


@pytest.mark.parametrize(
    ("worker", "host", "ended"),
    [
        ("q", A, [f"{A}/5/1"]),
        ("p", A, [f"{A}/5/2"]),
        ("p", B, [f"{B}/5/1"]),
        ("p", B, [f"{A}/5/1"]),
        ("p", "", [f"{A}/5/1", f"/{A}/5/1"]),
        ("p", "boot", [f"{A}/5/1"]),
    ],
)
def test_other_words_prove_nothing(
    worker: str, host: str, ended: Sequence[str], deaths: Deaths, proven: list[str]
) -> None:
    """Of another worker, of another process with that number, of another host, by another host, by
    one that cannot say which it is, and by one that says it in part."""
    deaths.lost(worker_of(f"{A}/5/1"))
    deaths.witness(worker, host, ended)
    assert proven == []
    assert deaths.witness("p", A, ()) == [f"{A}/5/1"]


def test_nobody_speaks_for_another_host(deaths: Deaths, proven: list[str]) -> None:
    deaths.witness("p", B, [f"{A}/5/1"])
    deaths.lost(worker_of(f"{A}/5/1"))
    assert proven == []


def test_a_process_that_nobody_can_name_is_never_proven(deaths: Deaths, proven: list[str]) -> None:
    deaths.lost(worker_of(f"{A}/5/1", ""))
    assert deaths.witness("p", A, [f"{A}/5/1", ""]) == []
    assert deaths.witness("p", "", ["", "/", "///"]) == []
    assert (proven, len(deaths.unproven)) == ([], 1)
    deaths.fence("p", 7)
    assert (proven, deaths.unproven) == ([GONE], [])


def test_what_lives_again_is_not_lost_and_memory_is_bounded(
    deaths: Deaths, proven: list[str]
) -> None:
    lost = worker_of(f"{A}/5/1")
    deaths.lost(lost)
    deaths.attached(lost)
    assert deaths.unproven == []
    for epoch in range(1, MOST_LOST + 9):
        deaths.lost(worker_of(f"{A}/5/{epoch}", epoch=epoch))
    assert len(deaths.unproven) == MOST_LOST
    deaths.lost(worker_of(f"{A}/5/1"), idle=True)
    assert len(deaths.unproven) == MOST_LOST, "one that left in order pushes out none"
    assert proven == []


def test_what_peers_ask_for_is_lost_though_this_router_never_lost_it(
    deaths: Deaths, proven: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started again. What is gone is no longer listed; who asks on is told."""
    both = [f"{A}/5/1", f"{B}/5/1"]
    assert not deaths.asked(GONE, both)
    assert [one["processes"] for one in deaths.unproven] == [2]
    assert deaths.witness("p", A, [f"{A}/5/1"]) == []
    assert deaths.witness("p", B, ()) == [f"{B}/5/1"]
    assert not deaths.asked(GONE, both), "what is proven stays so"
    assert deaths.witness("p", B, [f"{B}/5/1"]) == []
    assert proven == [GONE]
    assert deaths.asked(GONE, both)
    assert deaths.unproven == []
    deaths.attached(worker_of(*both))
    assert not deaths.asked(GONE, both), "it lives after all"
    assert deaths.asked("q-000000000000000f", []) is False
    assert deaths.witness("q", "", [""]) == [], "nobody is the witness of what has no name"
    deaths.fence("q", 15)
    assert deaths.asked("q-000000000000000f", [])
    deaths.lost(worker_of(f"{A}/8/1", epoch=8), idle=True)
    assert deaths.unproven == []
    assert not deaths.asked("p-0000000000000008", [f"{A}/8/1"])
    later_s = time.monotonic() + ASKED_S
    monkeypatch.setattr(witness_module_of_routers.time, "monotonic", lambda: later_s + 1)
    assert [one["epoch"] for one in deaths.unproven] == ["0000000000000008"], "nobody asks for 7"


@pytest.mark.parametrize("first", ["named", "ended"])
def test_one_that_asks_without_names_hides_none(
    first: str, deaths: Deaths, proven: list[str]
) -> None:
    """Another peer has them, before or after the witness comes."""
    name = f"{A}/5/1"
    assert not deaths.asked(GONE, [])
    if first == "ended":
        assert deaths.witness("p", A, [name]) == []
        assert proven == []
    assert not deaths.asked(GONE, [name])
    assert deaths.asked(GONE, []) == (first == "ended")
    if first == "named":
        assert deaths.witness("p", A, []) == [name]
        deaths.witness("p", A, [name])
    assert (proven, deaths.unproven) == ([GONE], [])


@pytest.mark.parametrize("name", ["", "-", "p", "-0000000000000007", "p-7", "p-000000000000000G"])
def test_what_is_no_name_of_a_start_is_none(name: str, deaths: Deaths) -> None:
    assert not deaths.asked(name, [f"{A}/5/1"])
    assert not deaths.asked("p" * 200 + name, [f"{A}/5/1"])
    assert deaths.unproven == []


def test_what_is_told_in_advance_is_bounded_for_each_worker(
    deaths: Deaths, proven: list[str]
) -> None:
    """One that says much costs no other worker its word."""
    deaths.witness("p", A, [f"{A}/5/1", f"{A}/6/{'1' * 10_000}"])
    for number in range(MOST_WORKERS - 1):
        deaths.witness(f"q{number}", A, [f"{A}/7/{number}" for number in range(MOST_ENDED + 9)])
    deaths.witness("q" * 10_000, A, [f"{A}/7/1"])
    deaths.lost(worker_of(f"{A}/5/1"))
    assert proven == [GONE]
    assert len(deaths._ended) == MOST_WORKERS
    assert {len(ended) for ended in deaths._ended.values()} == {1, MOST_ENDED}


def test_looking_goes_on_after_a_look_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, enough = [], threading.Event()

    def look(_: Witness) -> None:
        looks.append(len(looks))
        if len(looks) > 1:
            enough.set()
        raise OverflowError

    monkeypatch.setattr(Witness, "look", look)
    monkeypatch.setattr(witness_module, "LOOK_S", 0.01)
    nobody: Any = None
    with looking("p", nobody, nobody):
        assert enough.wait(10)


def test_the_kernel_knows_what_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    name = process_of(child.pid)
    assert name.startswith(f"{this_host()}/{child.pid}/")
    assert not has_ended(name)
    child.send_signal(signal.SIGSTOP)
    assert not has_ended(name), "a stopped one goes on with its writes when it wakes"
    child.kill()
    child.wait()
    assert has_ended(name)
    start = name.rpartition("/")[0]
    assert has_ended(f"{this_host()}/{os.getppid()}/1"), "its number is another's now"
    for foreign in ("", "x", f"{start}", f"boot/1/{os.getpid()}/1", *NO_NAMES):
        assert not has_ended(foreign), foreign


GUARD = """
import os, subprocess, sys
from kv_transfer.transports.processes import process_of
from worker.hosts.guard import Child, guarded
child = guarded()
if not isinstance(child, Child):
    grandchild, rank = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    child.keeps([rank.pid])
    print(grandchild.pid, process_of(rank.pid), flush=True)
    rank.kill()
    rank.wait()
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), 9)
    sys.exit(3)
code = child.wait()
print(code, *child.processes)
"""


@pytest.mark.parametrize(("how", "code"), [("ends", 3), ("killed", 137)])
def test_a_guard_waits_for_all_that_its_child_has_started(how: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GUARD, how], capture_output=True, text=True, check=True, timeout=60
    )
    (grandchild, rank), (said, *processes) = map(str.split, done.stdout.splitlines())
    assert said == str(code)
    assert len(processes) == 3
    assert rank in processes, "its parent has reaped it, and then ended"
    with pytest.raises(ProcessLookupError):
        os.kill(int(grandchild), 0)
