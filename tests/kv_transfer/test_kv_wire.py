from __future__ import annotations

import random

import pytest

from kv_transfer.types import MAX_GROUPS, MAX_NOTIFICATION_BYTES, TransportError
from kv_transfer.wire import (
    MAX_PAYLOAD_BYTES,
    Chunk,
    MalformedNotification,
    Message,
    Probe,
    Quiesce,
    Quiesced,
    decode,
    encode,
)
from prefixes.index import MOST_GROUPS

ID = bytes(range(16))
EPOCH = 2**64 - 1
MESSAGES: list[Message] = [
    Chunk(ID, EPOCH, 0, 4, 64),
    Chunk(ID, EPOCH, 4, 4, 65, last=True),
    Chunk(ID, EPOCH, 4, 5, 65, last=True, payload=b"x" * MAX_PAYLOAD_BYTES),
    Chunk(ID, EPOCH, 4, 5, 65, last=True, payload=b"", send_span_id=b"12345678"),
    Chunk(ID, EPOCH, 1, 5, 65, group=7),
    Quiesce(ID, 0),
    Quiesced(ID, 1),
    Probe(),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_survives_the_wire(message: Message) -> None:
    data = encode(message)
    assert len(data) <= MAX_NOTIFICATION_BYTES
    assert decode(data) == message


def test_layout_is_little_endian_and_packed() -> None:
    data = encode(Chunk(ID, 1, 2, 3, 48, True, b"pp", b"s" * 8))
    assert data == (
        b"BT\x02\x01" + ID + b"\x01" + bytes(7)
        + b"\0\x02\0\0\0\x03\0\0\0\x30\0\0\0\x03" + b"s" * 8 + b"\x02\0pp"
    )  # fmt: skip


def test_a_payload_that_does_not_fit_is_refused_before_posting() -> None:
    with pytest.raises(TransportError) as caught:
        encode(Chunk(ID, 1, 0, 1, 1, last=True, payload=b"x" * (MAX_PAYLOAD_BYTES + 1)))
    assert caught.value.cause == "payload_too_large"


@pytest.mark.parametrize("message", MESSAGES)
def test_truncated_and_padded_notifications_are_malformed(message: Message) -> None:
    data = encode(message)
    for length in {*range(min(len(data), 60)), len(data) - 1}:
        with pytest.raises(MalformedNotification):
            decode(data[:length])
    with pytest.raises(MalformedNotification):
        decode(data + b"\0")


def test_wrong_magic_version_kind_flags_and_ranges_are_malformed() -> None:
    data = bytearray(encode(MESSAGES[0]))
    # The last one: a group that no pool has.
    for at, value in ((0, 0), (2, 1), (3, 99), (41, 4), (41, 2), (29, 9), (28, 8)):
        broken = bytearray(data)
        broken[at] = value
        with pytest.raises(MalformedNotification):
            decode(bytes(broken))


def test_random_bytes_never_do_anything_but_parse_or_raise() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        data = bytearray(encode(rng.choice(MESSAGES[:2] + MESSAGES[3:])))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            decode(bytes(data))
        except MalformedNotification:
            continue


def test_indexes_of_pages_and_transfers_have_as_many_groups() -> None:
    """`kv_transfer` imports no other room, and the router not this one."""
    assert MOST_GROUPS == MAX_GROUPS
