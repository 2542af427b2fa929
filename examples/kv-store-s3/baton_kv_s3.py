"""`s3://BUCKET/PREFIX?endpoint=URL`: KV pages in S3. Credentials come from the usual variables."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

from obstore.exceptions import BaseError
from obstore.store import S3Store

from engine.tiers.stores.protocol import Buffers, StoreError


class BucketStore:
    """Objects of a bucket. Its size is bounded by the bucket's own rules, such as an expiry."""

    shared = True

    def __init__(self, bucket: S3Store, prefix: str) -> None:
        self._bucket, self._prefix = bucket, prefix

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        return [self._head(key) for key in keys]

    def _head(self, key: str) -> bool:
        try:
            return bool(self._bucket.head(self._prefix + key))
        except FileNotFoundError:
            return False

    def load(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        return [self._load(key, parts) for key, parts in zip(keys, buffers, strict=True)]

    def _load(self, key: str, parts: Buffers) -> bool:
        try:
            data = memoryview(self._bucket.get(self._prefix + key).bytes())
        except FileNotFoundError:
            return False
        start = 0
        for part in parts:
            piece = data[start : start + len(part)]
            part[: len(piece)] = piece  # A short object is damaged: the checksum shows it.
            start += len(part)
        return True

    def store(self, keys: Sequence[str], buffers: Sequence[Buffers]) -> list[bool]:
        for key, parts in zip(keys, buffers, strict=True):
            self._bucket.put(self._prefix + key, b"".join(parts))
        return [True] * len(keys)

    def remove(self, keys: Sequence[str]) -> None:
        self._bucket.delete([self._prefix + key for key in keys])

    def close(self) -> None:
        pass


def make(address: str, object_bytes: int) -> BucketStore:
    """Opens the bucket that an address names."""
    parts = urlsplit(address)
    endpoint = parse_qs(parts.query).get("endpoint", [""])[0]
    try:
        bucket = S3Store(
            parts.netloc,
            region="us-east-1",
            retry_config={"max_retries": 2},
            endpoint=endpoint or None,
            client_options={"allow_http": bool(endpoint)},
        )
    except BaseError as error:
        raise StoreError(f"{address}: {error}") from error
    return BucketStore(bucket, parts.path.lstrip("/") + "/" if parts.path.strip("/") else "")
