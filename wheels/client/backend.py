"""Builds `baton-client`: setuptools, behind a copy of what clients need of `baton/`.

Setuptools builds only from files below the folder of pyproject.toml, and `baton/` lies two folders
above it. A source archive has the copies.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools.build_meta import *  # noqa: F403

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SERVERS = shutil.ignore_patterns("__main__.py", "worker", "__pycache__")
"""What of `baton/` is not for clients: the command, and the protocol behind the router."""

if not (HERE / "PKG-INFO").exists():  # this is no unpacked source archive
    shutil.rmtree(HERE / "baton", ignore_errors=True)
    shutil.copytree(ROOT / "baton", HERE / "baton", ignore=SERVERS)
    shutil.copyfile(ROOT / "LICENSE", HERE / "LICENSE")
