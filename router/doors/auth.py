"""Who may call: bearer tokens, the tenant that each stands for, and how much a tenant may have.

One key may let callers in (`KeyGate`), or a file of tokens (`TokenGate`). Without either everybody
may call. Callers without a file are no tenant's.

The file is TOML, one line a token: `"sk-..." = "tenant"`. Behind the tokens a table
`[limits.TENANT]` may limit what a tenant has under way at once: `requests`, `tokens`, `sequences`
(`router.jobs.Quota`), and the table `[models]` may list the names of models and adapters that a
tenant may use: `TENANT = ["law"]`. Tenants that are not in it may use all. The file is read at
start, and again when it has changed: tokens come and go without a restart. A change that cannot be
read is logged, and the tokens known before stay.

Tokens are stored and looked up as digests, so the time of a look-up says nothing about them.
"""

from __future__ import annotations

import hashlib
import logging
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final, Protocol

from router import errors
from router.call import Caller
from router.jobs import NO_QUOTA, Quota

logger = logging.getLogger(__name__)

AUTHORIZATION: Final = "authorization"
"""Key of gRPC metadata, and name of the HTTP header."""
CHECK_INTERVAL_S: Final = 1.0
"""A change of the file counts at the latest after this."""
LIMITS: Final = "limits"
"""Key of the tables of limits, which no token can have."""
MODELS: Final = "models"
"""Key of the table of names that tenants may use; no token can have it, either."""
_SCHEME: Final = "bearer "


class TokensFileError(Exception):
    """The file of tokens cannot be used; the message quotes nothing of it."""


class Gate(Protocol):
    """Decides who may call."""

    def caller_of(self, authorization: str | None) -> Caller:
        """Who calls.

        Raises:
            RouterError: UNAUTHENTICATED.
        """
        ...

    def caller_named(self, tenant: str) -> Caller | None:
        """The tenant, in whose name work goes on when no call of its is there; None if there is no
        such tenant any more."""
        ...


NOBODY: Final = Caller()


class OpenGate:
    """Lets everybody in."""

    def caller_of(self, authorization: str | None) -> Caller:
        """Nobody in particular."""
        return NOBODY

    def caller_named(self, tenant: str) -> Caller | None:
        """Nobody in particular is the only one."""
        return None if tenant else NOBODY


class KeyGate(OpenGate):
    """Lets in callers with one key."""

    def __init__(self, key: str) -> None:
        self._callers = {_digest(key): NOBODY}

    def caller_of(self, authorization: str | None) -> Caller:
        """Nobody in particular, who shows `Bearer KEY`.

        Raises:
            RouterError: UNAUTHENTICATED.
        """
        return _caller(self._callers, authorization)


class TokenGate:
    """Lets in callers with a token of the file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads the file.

        Raises:
            TokensFileError: it cannot be read, does not name one tenant for each token, or has
                limits or names that are none.
        """
        self._path = path
        self._clock = clock
        self._stamp = _stamp(path)
        self._callers = _read(path)
        self._checked_s = clock()

    def caller_of(self, authorization: str | None) -> Caller:
        """Who shows `Bearer TOKEN`.

        Raises:
            RouterError: UNAUTHENTICATED.
        """
        self._refresh()
        return _caller(self._callers, authorization)

    def caller_named(self, tenant: str) -> Caller | None:
        """A tenant of the file."""
        self._refresh()
        return next((one for one in self._callers.values() if one.tenant == tenant), None)

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._callers = _read(self._path)
        except TokensFileError as error:
            logger.error("the changed tokens file is not used: %s", error)
        else:
            logger.info("tokens read again", extra={"tokens": len(self._callers)})


OPEN: Final = OpenGate()


def gate_of(path: str, key: str = "") -> Gate:
    """The gate for two settings, of which one is set at most; "" and "" give an open one.

    Raises:
        TokensFileError: as `TokenGate`.
    """
    if key:
        return KeyGate(key)
    return TokenGate(Path(path)) if path else OPEN


def _caller(callers: Mapping[bytes, Caller], authorization: str | None) -> Caller:
    """Who shows the header, by digest of the tokens."""
    scheme, token = (authorization or "")[: len(_SCHEME)], (authorization or "")[len(_SCHEME) :]
    caller = callers.get(_digest(token.strip())) if scheme.lower() == _SCHEME else None
    if caller is None:
        raise errors.unauthenticated()
    return caller


def _read(path: Path) -> dict[bytes, Caller]:
    """Callers by digest of their tokens. What is wrong is said without a token in it."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokensFileError(f"{path}: {error.strerror}") from None
    except ValueError:  # Errors of TOML and of UTF-8 are ValueErrors, too.
        raise TokensFileError(f"{path} is not TOML") from None
    limits, bound = content.pop(LIMITS, {}), content.pop(MODELS, {})
    tenants: dict[str, str] = content
    if not all(token and isinstance(name, str) and name for token, name in tenants.items()):
        raise TokensFileError(f'{path}: every line must be "token" = "tenant"')
    quotas = _quotas(path, limits, set(tenants.values()))
    names = _names(path, bound, set(tenants.values()))
    is_alone = len(set(tenants.values())) < 2
    return {
        _digest(token): Caller(name, quotas.get(name, NO_QUOTA), is_alone, names.get(name))
        for token, name in tenants.items()
    }


def _quotas(path: Path, limits: object, tenants: set[str]) -> dict[str, Quota]:
    names = {one.name for one in fields(Quota)}
    if not isinstance(limits, dict) or not limits.keys() <= tenants:
        raise TokensFileError(f"{path}: a table [{LIMITS}.TENANT] must name a tenant of the file")
    for name, table in limits.items():
        is_table = isinstance(table, dict) and table.keys() <= names
        if not is_table or not all(type(most) is int and most > 0 for most in table.values()):
            known = ", ".join(sorted(names))
            raise TokensFileError(f"{path}: [{LIMITS}.{name}] takes whole numbers above 0: {known}")
    return {name: Quota(**table) for name, table in limits.items()}


def _names(path: Path, bound: object, tenants: set[str]) -> dict[str, frozenset[str]]:
    """What tenants may use, of those that may not use all."""
    if not isinstance(bound, dict) or not bound.keys() <= tenants:
        raise TokensFileError(f"{path}: the table [{MODELS}] must name tenants of the file")
    for tenant, names in bound.items():
        is_list = isinstance(names, list) and bool(names)
        if not is_list or not all(isinstance(name, str) and name for name in names):
            raise TokensFileError(f"{path}: {MODELS}.{tenant} must be a list of names")
    return {tenant: frozenset(names) for tenant, names in bound.items()}


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
