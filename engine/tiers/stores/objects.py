"""Objects: the form in which pages lie in stores.

An object is a header of 4 KiB and the slots of 256 tokens. Its name has the model's fingerprint,
the range of KV heads and the key of its last page, in which all tokens before, the tenant's salt
and the precision are. The header repeats the name and the length. A digest covers header and
pages: XXH3 against damage, or BLAKE3 with a key where others can write to the store.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.tiers.stores.protocol import Buffers, StoreError

OBJECT_TOKENS: Final = 256
HEADER_BYTES: Final = 4096
_FIELDS: Final = struct.Struct("<8sIQ32s256s")
"""Magic, number of pages, bytes of them, digest, name."""
_MAGIC: Final = {False: b"BATONKX1", True: b"BATONKB1"}
_LEAST_SECRET_BYTES: Final = 16
"""128 bits: shorter secrets can be tried out."""


@dataclass(frozen=True, slots=True)
class ObjectForm:
    """What all objects of a worker have in common.

    Args:
        fingerprint: of the model (`ModelInfo.fingerprint`).
        heads: KV heads whose pages these are, [first, end).
        pages: pages in an object.
        slot_bytes: bytes of a page, padded.
        secret: key of the signature, 32 bytes; empty: objects are not signed.
    """

    fingerprint: str
    heads: tuple[int, int]
    pages: int
    slot_bytes: int
    secret: bytes = b""

    @property
    def object_bytes(self) -> int:
        """Bytes of an object with its header."""
        return HEADER_BYTES + self.pages * self.slot_bytes

    def name(self, key: bytes) -> str:
        """Name of the object whose last page has this key."""
        return f"{self.fingerprint}.h{self.heads[0]}-{self.heads[1]}.{key.hex()}"

    def seal(self, name: str, parts: Buffers) -> None:
        """Writes the header into the first part. The others have the pages."""
        parts[0][:] = bytes(HEADER_BYTES)
        parts[0][: _FIELDS.size] = self._header(name, self._digest(name, parts))

    def is_whole(self, name: str, parts: Buffers) -> bool:
        """Whether the parts are the object of this name, as it was sealed."""
        expected = self._header(name, self._digest(name, parts))
        return hmac.compare_digest(bytes(parts[0][: _FIELDS.size]), expected)

    def _header(self, name: str, digest: bytes) -> bytes:
        size = self.pages * self.slot_bytes
        magic = _MAGIC[bool(self.secret)]
        return _FIELDS.pack(magic, self.pages, size, digest, name.encode("ascii"))

    def _digest(self, name: str, parts: Buffers) -> bytes:
        digest = self._hasher()
        digest.update(self._header(name, b""))
        for part in parts[1:]:
            digest.update(part)
        return bytes(digest.digest())

    def _hasher(self) -> Any:
        if not self.secret:
            import xxhash

            return xxhash.xxh3_128()
        from blake3 import blake3

        return blake3(key=self.secret)


def read_secret(path: str) -> bytes:
    """The key of signatures, from a file; empty without one.

    Raises:
        StoreError: the file cannot be read or has less than 16 bytes.
    """
    secret = stated_secret(path)
    if not secret:
        return b""
    from blake3 import blake3

    return blake3(secret, derive_key_context="baton kv objects 1").digest()


def stated_secret(path: str) -> bytes:
    """What a file with a secret says; empty without one. Raises as `read_secret`."""
    if not path:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise StoreError(f"kv_secret_file {path}: {error.strerror}") from error
    if len(secret) < _LEAST_SECRET_BYTES:
        raise StoreError(f"kv_secret_file {path}: fewer than {_LEAST_SECRET_BYTES} bytes")
    return secret
