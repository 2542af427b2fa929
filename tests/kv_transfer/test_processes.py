"""A peer's process is gone when the kernel says so, and never before."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from kv_transfer.transports.processes import ProcessWatch, own_process

TELL = (
    "import sys; from kv_transfer.transports.processes import own_process; "
    "print(own_process(), flush=True)"
)


def start() -> tuple[subprocess.Popen[str], str]:
    child = subprocess.Popen(
        [sys.executable, "-c", f"{TELL}; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    return child, child.stdout.readline().strip()


def gone_within(watch: ProcessWatch, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if names := watch.gone():
            return names
        time.sleep(0.005)
    return []


def test_a_kill_is_proof_and_a_stop_is_none():
    child, process = start()
    watch = ProcessWatch()
    watch.watch("peer", [process])
    assert watch.gone() == []
    child.send_signal(signal.SIGSTOP)
    assert gone_within(watch, 0.2) == []
    child.kill()
    assert gone_within(watch, 20) == ["peer"]
    assert watch.gone() == []
    child.wait()


def test_a_process_that_ended_before_is_gone_at_once():
    child, process = start()
    child.kill()
    child.wait()
    watch = ProcessWatch()
    watch.watch("peer", [process])
    assert watch.gone() == ["peer"]


def test_a_number_taken_by_another_process_is_not_that_process():
    host_and_pid, _ = own_process().rsplit("/", 1)
    child, _ = start()
    process = host_and_pid.rsplit("/", 1)[0] + f"/{child.pid}/1"
    watch = ProcessWatch()
    watch.watch("peer", [process])
    assert watch.gone() == ["peer"]
    child.kill()
    child.wait()


def test_a_process_that_is_hidden_from_this_one_is_not_taken_for_gone(monkeypatch):
    """/proc may be mounted so that one sees one's own processes only (hidepid)."""
    child, process = start()
    watch = ProcessWatch()
    with monkeypatch.context() as hidden:
        hidden.setattr("kv_transfer.transports.processes._started_or_none", lambda pid: None)
        watch.watch("peer", [process])
    assert watch.gone() == []
    child.kill()
    assert gone_within(watch, 20) == ["peer"]
    child.wait()


def test_processes_of_other_hosts_are_never_proven_gone():
    watch = ProcessWatch()
    elsewhere = own_process().split("/")
    for process in ("", "nonsense", "/".join(["other-boot", *elsewhere[1:]]), own_process()):
        watch.watch("peer", [process])
    assert watch.gone() == []
    watch.close()
