"""Admission of callers: bearer tokens and their tenants.

The file is TOML, one line a token: `"sk-..." = "tenant"`. It is read at start and after each
change, so tokens change without a restart. A change that cannot be read is logged, and the old
tokens stay. Without a file everybody may call, as no tenant.

Tokens are stored and looked up as digests, so the time of a look-up says nothing about them.
"""

from __future__ import annotations

import hashlib
import logging
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from router import errors

logger = logging.getLogger(__name__)

AUTHORIZATION: Final = "authorization"
"""Key of gRPC metadata, and name of the HTTP header."""
CHECK_INTERVAL_S: Final = 1.0
"""A change of the file takes effect within this many seconds."""
_SCHEME: Final = "bearer "


class TokensFileError(Exception):
    """The file of tokens cannot be used; the message quotes nothing of it."""


class Gate(Protocol):
    """Decides who may call."""

    def tenant_of(self, authorization: str | None) -> str:
        """The caller's tenant, "" for none.

        Raises:
            RouterError: UNAUTHENTICATED.
        """
        ...


class OpenGate:
    """Lets everybody in."""

    def tenant_of(self, authorization: str | None) -> str:
        """No tenant."""
        return ""


class TokenGate:
    """Lets in callers with a token of the file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file.

        Raises:
            TokensFileError: it cannot be read, or does not name one tenant for each token.
        """
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._tenants = _read(path)
        self._checked_s = clock()

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of `Bearer TOKEN`.

        Raises:
            RouterError: UNAUTHENTICATED.
        """
        self._refresh()
        scheme, token = (authorization or "")[: len(_SCHEME)], (authorization or "")[len(_SCHEME) :]
        tenant = self._tenants.get(_digest(token.strip())) if scheme.lower() == _SCHEME else None
        if tenant is None:
            raise errors.unauthenticated()
        return tenant

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tenants = _read(self._path)
        except TokensFileError as error:
            logger.error("the changed tokens file is not used: %s", error)
        else:
            logger.info("tokens read again", extra={"tokens": len(self._tenants)})


OPEN: Final = OpenGate()


def gate_of(path: str) -> Gate:
    """The gate for a setting; "" gives an open one.

    Raises:
        TokensFileError: as `TokenGate`.
    """
    return TokenGate(Path(path)) if path else OPEN


def _read(path: Path) -> dict[bytes, str]:
    """Tenants by digest of their tokens. Errors do not quote the file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokensFileError(f"{path}: {error.strerror}") from None
    except ValueError:  # Errors of TOML and of UTF-8 are ValueErrors, too.
        raise TokensFileError(f"{path} is not TOML") from None
    if not all(token and isinstance(name, str) and name for token, name in content.items()):
        raise TokensFileError(f'{path}: every line must be "token" = "tenant"')
    return {_digest(token): tenant for token, tenant in content.items()}


def _stamp(path: Path) -> tuple[int, ...]:
    """A value that changes with the file; empty if there is no file. It has the size, too: two
    writes may fall into one tick of the file system's clock, with a read between them."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()
