"""Opens a store by its address.

disk:PATH?gib=N      a disk of this host
dir:PATH?gib=N       a folder that others mount, too
mooncake://HOST:PORT a cluster's Mooncake store
NAME:...             an installed package's, by the entry point `baton.kv_stores`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Final
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit

from engine.tiers.stores.disk import DiskStore
from engine.tiers.stores.folder import FolderStore
from engine.tiers.stores.objects import ObjectForm, stated_secret
from engine.tiers.stores.protocol import PageStore, StoreError

ENTRY_POINTS: Final = "baton.kv_stores"
BOUNDED_TOGETHER: Final = frozenset({"dir"})
"""Stores whose size is a bound of all who write there, whatever they write."""
MakeStore = Callable[[str, int], PageStore]
"""Makes a store of an address, for objects of so many bytes. Raises StoreError."""


def scheme_of(address: str) -> str:
    """The part of an address before the first colon."""
    return address.partition(":")[0]


def address_of(address: str, group: str, share: float) -> str:
    """The address of a group's part of a store.

    Args:
        address: the store's.
        group: the group's name; empty for group 0. On a disk it has a folder of that name there.
            The names of objects have it, too.
        share: the group's part of the store's size, if it has one.
    """
    parts = urlsplit(address)
    options = parse_qs(parts.query)
    if share == 1 or parts.scheme in BOUNDED_TOGETHER or "gib" not in options:
        return address
    with suppress(ValueError):  # Whoever opens it says so.
        options["gib"] = [str(float(options["gib"][-1]) * share)]
    path = f"{parts.path.rstrip('/')}/{group}" if group and parts.scheme == "disk" else parts.path
    query = urlencode(options, doseq=True, safe="/:,")
    return parts._replace(path=path, query=query).geturl()


def open_store(address: str, form: ObjectForm) -> PageStore:
    """Opens a store.

    Raises:
        StoreError: the address is unknown or malformed, the store cannot be opened, or its objects
            must be signed and are not.
    """
    store = _maker(address)(address, form.object_bytes)
    if store.shared and not form.secret:
        store.close()
        raise _unsigned(address)
    return store


def look_at(address: str, secret_file: str) -> None:
    """What can be said of a store without opening it.

    Raises:
        StoreError: as `open_store`, or the file with the secret cannot be read.
    """
    scheme = scheme_of(address)
    if scheme not in _OWN and not entry_points(group=ENTRY_POINTS, name=scheme):
        raise _unknown(address)
    if scheme in _ON_DISKS:
        _path_and_size(address)
    if scheme in _SHARED and not secret_file:
        raise _unsigned(address)
    stated_secret(secret_file)


def _unsigned(address: str) -> StoreError:
    return StoreError(f"{address}: others can write to this store: it needs kv_secret_file")


def _unknown(address: str) -> StoreError:
    known = sorted({*_OWN, *(point.name for point in entry_points(group=ENTRY_POINTS))})
    return StoreError(f"{address}: no store of this kind; there are {', '.join(known)}")


def _maker(address: str) -> MakeStore:
    scheme = scheme_of(address)
    if scheme in _OWN:
        return _OWN[scheme]
    for point in entry_points(group=ENTRY_POINTS, name=scheme):
        try:
            make: MakeStore = point.load()
        except Exception as error:
            raise StoreError(f"{address}: {point.value} cannot be loaded: {error}") from error
        return make
    raise _unknown(address)


def _disk(address: str, object_bytes: int) -> PageStore:
    path, size = _path_and_size(address)
    return DiskStore(path, size, object_bytes)


def _folder(address: str, object_bytes: int) -> PageStore:
    path, size = _path_and_size(address)
    return FolderStore(path, size, object_bytes)


def _path_and_size(address: str) -> tuple[str, int]:
    parts: SplitResult = urlsplit(address)
    options = parse_qs(parts.query)
    try:
        (gib,) = options.pop("gib")
        size = int(float(gib) * (1 << 30))
    except (KeyError, ValueError):
        raise StoreError(
            f"{address}: its size is missing, as in {parts.scheme}:PATH?gib=100"
        ) from None
    if options or not parts.path:
        raise StoreError(f"{address}: the form is {parts.scheme}:PATH?gib=N")
    return parts.path, size


def _mooncake(address: str, object_bytes: int) -> PageStore:
    from engine.tiers.stores.mooncake import MooncakeStore

    return MooncakeStore(address, object_bytes)


_OWN: Final[dict[str, MakeStore]] = {"disk": _disk, "dir": _folder, "mooncake": _mooncake}
_ON_DISKS: Final = frozenset({"disk", "dir"})
_SHARED: Final = frozenset({"dir", "mooncake"})
"""Others can write to these, whatever their address says."""
