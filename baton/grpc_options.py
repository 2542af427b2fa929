"""Options of every gRPC channel and server of Baton, so that both ends of a connection agree.

Both ends send HTTP/2 pings. They reveal a frozen machine or network within `DETECTION_MS`. gRPC's
own threads answer pings, so pings reveal neither a hung step loop nor a held GIL; for these cases
workers report a progress counter.

Two options are easy to miss. Without `grpc.http2.ping_timeout_ms` a ping waits a minute for its
answer, whatever the keepalive timeout is. Without `grpc.http2.max_ping_strikes` a server takes the
pings on a long silent stream for abuse and closes it ("Too many pings"). A minimum interval between
pings would not be enough: on a busy machine several may arrive at once.

Most of the detection time is left for the answer. On a busy machine threads may be more than a
second late, and closing a healthy connection loses its work.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import grpc

Options = list[tuple[str, int]]
ClientOptions = list[tuple[str, int | str]]

KEEPALIVE_INTERVAL_MS: Final = 500
"""Silence on a connection after which it is pinged."""
PING_TIMEOUT_MS: Final = 2_000
"""Longest wait for a ping's answer before the connection is closed."""
CLIENT_PING_TIMEOUT_MS: Final = 10_000
"""Longest time for a client's ping. It is longer, since clients hold no pages and a busy machine
must not break their streams."""
DETECTION_MS: Final = KEEPALIVE_INTERVAL_MS + PING_TIMEOUT_MS
"""Longest time until a silent peer is noticed; kept below 3 s."""
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Room for the longest prompts as packed ids, and for log probabilities of all their tokens."""
PUBLIC_MESSAGE_BYTES: Final = 8 * 1024 * 1024
"""Most bytes of a client's request. Routers refuse smaller ones, too, where no context has room for
them (`router.requests.bounds`); this much is read before anybody can look at it."""
PUBLIC_HANDSHAKE_MS: Final = 10_000
"""For a client's first words: as long as for the headers of HTTP/1."""
PUBLIC_IDLE_MS: Final = 75_000
"""Without a call: as long as for HTTP/1."""
PUBLIC_AGE_MS: Final = 1_800_000
"""Rare enough that connecting anew costs nothing."""

SERVICE_CONFIG: Final = Path(__file__).parent / "inference" / "v1" / "service_config.json"
"""Rules by which a client's channel repeats calls. They are a file, for clients in any language."""


def _options(ping_timeout_ms: int = PING_TIMEOUT_MS) -> Options:
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", ping_timeout_ms),
        ("grpc.http2.ping_timeout_ms", ping_timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ]


CONNECT_TIMEOUT_MS: Final = 5_000
"""Longest time for TCP and HTTP/2 handshakes; long distances and busy machines need some of it."""


NO_PROXY: Final = ("grpc.enable_http_proxy", 0)
"""The option of a channel that takes no proxy of the environment."""


def channel_options(ping_timeout_ms: int = PING_TIMEOUT_MS) -> Options:
    """Options of `grpc.aio.insecure_channel` and its siblings.

    The first wait before reconnecting is 100 ms, the longest is a second. One attempt may take
    `CONNECT_TIMEOUT_MS`: gRPC's option `min_reconnect_backoff_ms` sets that. Each channel has a
    connection of its own, so that closing one affects no other.
    """
    return [
        *_options(ping_timeout_ms),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def direct_options() -> Options:
    """`channel_options` of a channel that takes no proxy: `no_proxy` may exempt a name, but not the
    addresses that the name stands for."""
    return [*channel_options(), NO_PROXY]


def client_options(*, retries: bool) -> ClientOptions:
    """Options of a channel to the public API.

    With `retries`, `SERVICE_CONFIG` applies:

    - A call that ends with UNAVAILABLE or RESOURCE_EXHAUSTED before its first message is sent
      again, four times in all. The router names the wait (`grpc-retry-pushback-ms`); otherwise it
      is 0.2 s and doubles up to 2 s.
    - A call that ends with CANCELLED, and was not cancelled here, is sent again, too. A stopping
      server gives this status to calls that it has received and not begun.
    - If half of ten recent calls failed, no call is repeated, so that an outage is not made worse.

    gRPC keeps a request for its repetition. The default limit would be too small for long prompts.
    """
    options = channel_options(CLIENT_PING_TIMEOUT_MS)
    if not retries:
        return [*options, ("grpc.enable_retries", 0)]
    return [
        *options,
        ("grpc.service_config", SERVICE_CONFIG.read_text(encoding="utf-8")),
        ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES),
    ]


def server_options(*, reuse_port: bool = False) -> Options:
    """Options of `grpc.aio.server`. Two processes share a port only if both set `reuse_port`."""
    return [
        *_options(),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", int(reuse_port)),
    ]


def public_server_options(
    max_connections: int, longest_call_s: float, *, reuse_port: bool = False
) -> Options:
    """Options of a `grpc.aio.server` that anybody may reach.

    A message is taken as it comes: compressed, a few bytes could stand for megabytes. A connection
    that does not begin to speak HTTP/2, or has had no call for a while, is closed; clients connect
    anew with their next call. One connection too many is closed at once. So is, after a while, one
    that is old: calls go on until they must have ended, and then those end whose client reads
    nothing, which a server has no other way to do.

    Args:
        max_connections: that are open at the same time.
        longest_call_s: within which any call ends.
        reuse_port: as `server_options` has it.
    """
    changed = dict(server_options(reuse_port=reuse_port))
    changed["grpc.max_receive_message_length"] = PUBLIC_MESSAGE_BYTES
    changed["grpc.compression_enabled_algorithms_bitset"] = 1 << grpc.Compression.NoCompression
    changed["grpc.server_handshake_timeout_ms"] = PUBLIC_HANDSHAKE_MS
    changed["grpc.max_connection_idle_ms"] = PUBLIC_IDLE_MS
    changed["grpc.max_connection_age_ms"] = PUBLIC_AGE_MS
    changed["grpc.max_connection_age_grace_ms"] = math.ceil(longest_call_s * 1e3)
    changed["grpc.max_allowed_incoming_connections"] = max_connections
    return list(changed.items())
