"""Hosts for tests: namespaces of network and processes, with a cable to this machine's own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil
from waiting import wait_until

NEEDS = "namespaces of network and processes need root, its rights, and iproute2"


def can_have_hosts() -> bool:
    """Whether this process may make them, with a cable, and has what does it."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    cable = ["ip", "link", "add", "bt0", "type", "veth", "peer", "name", "bt1"]
    within = ["unshare", "-n", "-p", "-f", "--mount-proc", *cable]
    return subprocess.run(within, capture_output=True, check=False).returncode == 0


class Host:
    """Another host: what runs there sees its own processes and its own end of the cable alone. It
    ends with its block."""

    def __init__(self) -> None:
        tag = f"{os.getpid() % 10000}"
        self._ends = f"bt{tag}a", f"bt{tag}b"
        self.network = f"10.{64 + os.getpid() % 64}.1.0/24"
        self.near, self.address = (self.network.replace("0/24", end) for end in ("1", "2"))
        """Addresses of this machine's end, and of the host's."""
        within = ["unshare", "-n", "-p", "-f", "--mount-proc", "sleep", "inf"]
        self._first = subprocess.Popen(within)
        found = wait_until(lambda: psutil.Process(self._first.pid).children(), 10)
        self._init = found[0]
        wait_until(lambda: self._init.name() == "sleep", 10)
        near, far = self._ends
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", str(self._init.pid))
        _ip("addr", "add", f"{self.near}/24", "dev", near)
        _ip("link", "set", near, "up")
        self.run(["ip", "addr", "add", f"{self.address}/24", "dev", far])
        self.run(["ip", "link", "set", far, "up"])
        self.run(["ip", "link", "set", "lo", "up"])
        self.run(["mount", "-t", "sysfs", "sysfs", "/sys"])  # UCX reads its interfaces there.

    def run(self, argv: Sequence[str]) -> str:
        """What a command there writes."""
        done = subprocess.run([*self._enter, *argv], capture_output=True, check=True, text=True)
        return done.stdout

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Starts a command there. Its first child is the command itself."""
        with log.open("ab") as file:
            return subprocess.Popen(
                [*self._enter, *argv],
                env={**os.environ, **environment},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def cut(self) -> None:
        """The cable is out."""
        _ip("link", "set", self._ends[0], "down")

    def mend(self) -> None:
        """The cable is in again."""
        _ip("link", "set", self._ends[0], "up")

    def processes(self, word: str = "") -> list[psutil.Process]:
        """What runs there and has this word in its command line."""
        if not self._init.is_running():
            return []
        inside = os.stat(f"/proc/{self._init.pid}/ns/pid").st_ino
        found = []
        for process in psutil.process_iter():
            try:
                own = os.stat(f"/proc/{process.pid}/ns/pid").st_ino == inside
                named = any(word in one for one in process.cmdline())
                if own and named and process.pid != self._init.pid:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def listening(self) -> set[str]:
        """Addresses at which somebody there takes connections."""
        lines = self.run(["ss", "-Hltn"]).splitlines()
        ends = (line.split()[3].rpartition(":")[0].strip("[]") for line in lines)
        return {end.removeprefix("::ffff:") for end in ends}

    def close(self) -> None:
        """Everything there ends. A second call does nothing."""
        if not self._init.is_running():
            return
        self._init.send_signal(signal.SIGKILL)
        self._first.wait(10)
        subprocess.run(["ip", "link", "del", self._ends[0]], capture_output=True, check=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def interface(self) -> str:
        """The name of this machine's end."""
        return self._ends[0]

    @property
    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._init.pid), "-n", "-p", "-m"]


def baton(*words: str) -> list[str]:
    """A command line."""
    return [sys.executable, "-m", "baton", *words]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)
