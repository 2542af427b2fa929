"""Follows docs/hosts.md from one command a host to a trace, word for word but for the addresses.

python follow_page.py FOLDER, in namespaces of network and mounts of its own, where no port is
taken. FOLDER has the model. It prints what the last command has printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hosts_kit import Host
from waiting import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
ATTACHED = "worker=prefill-0"
"""What the page says to wait for in the router's log, which is the first."""


def commands(host: Host) -> list[tuple[str, bool]]:
    """The commands of the page, and whether each is for the first host."""
    (block, *_), here = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL), True
    for theirs, ours in (
        ("10.1.0.1", host.near),
        ("10.1.0.2", host.address),
        ("10.1.0.0/24", host.network),
    ):
        block = block.replace(theirs, ours)
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("# on"):
            here = host.near in line
        elif command := line.partition("#")[0].strip():
            found.append((command, here))
    return found


def main(folder: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)  # UCX reads it.
    os.chdir(folder)
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    running: list[subprocess.Popen[bytes]] = []
    with Host() as host:
        for command, here in commands(host):
            name, _, value = command.removeprefix("export ").partition("=")
            if command.startswith("export "):
                os.environ[name] = value
            elif command.startswith("baton certs "):
                subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)
            elif command.startswith("baton generate "):
                log = Path("0.log")
                wait_until(lambda log=log: ATTACHED in log.read_text(), 120, show=log.read_text)
                subprocess.run(command, shell=True, check=True)
            else:
                where, within = (host._enter if not here else []), f"cd {folder} && exec {command}"
                with Path(f"{len(running)}.log").open("wb") as file:
                    argv = [*where, "sh", "-c", within]
                    running.append(subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT))
        for process in running:
            process.terminate()
        for process in running:
            process.wait(60)


if __name__ == "__main__":
    main(sys.argv[1])
