"""Certificates for tests, as `baton certs` makes them, and some that it never would."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from baton.tls import TlsFiles
from serving.net.certificates import (
    Authority,
    issue,
    names_of_pool,
    names_of_router,
    new_authority,
)

ROUTER = names_of_router()
EXPIRED = {"from_now_days": -3.0, "days": 2.0}


@cache
def authority(name: str = "cluster") -> Authority:
    """One for each name."""
    return new_authority(name)


def written(
    folder: Path,
    names: Sequence[str],
    *,
    by: str = "cluster",
    trusting: str = "cluster",
    **when: float,
) -> TlsFiles:
    """Writes a certificate with these names, in place of the one that was in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = issue(authority(by), names, **when)
    for name, content in (
        ("ca", authority(trusting).pem),
        ("key", made.key),
        ("cert", made.cert),
    ):
        fresh = folder / f"{name}.new"
        fresh.write_bytes(content)
        fresh.replace(folder / f"{name}.pem")
    return TlsFiles(*(str(folder / f"{name}.pem") for name in ("ca", "cert", "key")))


def of_router(folder: Path) -> TlsFiles:
    return written(folder, ROUTER)


def of_pool(folder: Path, pool: str) -> TlsFiles:
    return written(folder, names_of_pool(pool))


def settings_of_member(files: TlsFiles) -> dict[str, str]:
    """Settings of a router or worker with this certificate."""
    return {"tls_ca": files.ca, "tls_cert": files.cert, "tls_key": files.key}


def settings_of_door(files: TlsFiles) -> dict[str, str]:
    """Settings of a router whose doors show this certificate."""
    return {"tls_door_cert": files.cert, "tls_door_key": files.key}
