"""What tests use beside Python packages, and the Debian packages that bring it.

python3 tests/debian.py [--tell]    names those that are missing here; --tell: in a sentence

It runs before anything is installed, with a plain Python.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

PROGRAMS = {
    "cc": "gcc libc6-dev",
    "curl": "curl",
    "docker-compose": "docker-compose",
    "ip": "iproute2",
    "node": "nodejs",
    "npm": "npm",
    "openssl": "openssl",
    "prometheus": "prometheus",
    "promtool": "prometheus",
}
LIBRARIES = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
}
"""Of Mooncake's wheel."""


def missing() -> list[str]:
    """The packages that are to be installed here."""
    found = {package for name, package in PROGRAMS.items() if shutil.which(name) is None}
    found.update(package for name, package in LIBRARIES.items() if not _loads(name))
    return sorted({word for package in found for word in package.split()})


def program(name: str) -> str:
    """The path of a program of Debian's, or of one that a Python package brings."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        brings = PROGRAMS.get(name)
        give_up(f"{name} is not installed" + (f": apt-get install {brings}" if brings else ""))
    return found


def libraries() -> None:
    """The libraries are there."""
    if packages := sorted(LIBRARIES[name] for name in LIBRARIES if not _loads(name)):
        give_up(f"Mooncake lacks libraries: apt-get install {' '.join(packages)}")


def give_up(why: str) -> NoReturn:
    """Skips a test. Continuous integration has all that tests need, so there it fails."""
    import pytest

    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    packages = " ".join(missing())
    if packages and "--tell" in sys.argv:
        print(f"tests that need these of Debian are skipped: {packages}")
        print("`make install-debian` installs them, as root")
    elif packages:
        print(packages)
