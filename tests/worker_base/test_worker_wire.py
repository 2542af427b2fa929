"""Messages to records and back."""

from __future__ import annotations

import numpy as np
import pytest

from baton.worker.v1 import worker_pb2
from engine.types import Mode, TokenRecord
from kv_transfer.types import Endpoint, PageGroup
from kv_transfer.wire import MAX_PAYLOAD_BYTES as ROOM_BYTES
from router.requests.selecting import MAX_BEAM_CANDIDATES
from serving.wire import pack_ids
from worker_base.messages import (
    MAX_PAYLOAD_BYTES,
    MalformedMessage,
    decode_first_tokens,
    encode_first_tokens,
    endpoint_message,
    endpoint_of,
    kv_tokens,
    record_message,
    record_of,
    request_of,
    resumed_tokens,
    unpack_ids,
)


def test_ids_survive_packing() -> None:
    ids = [0, 1, 2**31 - 1]
    assert unpack_ids(pack_ids(ids)).tolist() == ids
    assert pack_ids(np.array(ids, np.int32)) == pack_ids(ids)
    assert unpack_ids(b"").size == 0


@pytest.mark.parametrize("packed", [b"\1", b"\1\2\3\4\5", b"\xff\xff\xff\xff"])
def test_ids_that_are_none_are_refused(packed: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_ids(packed)


GENERATED = [worker_pb2.GeneratedTokens(token_ids=pack_ids([8, 9]))]


def submit(**changes: object) -> worker_pb2.Submit:
    fields = {
        "attempt_id": b"a" * 16,
        "mode": worker_pb2.WORK_MODE_DECODE,
        "prompt_ids": pack_ids([5, 6, 7]),
        "choices": 1,
    }
    return worker_pb2.Submit(**{**fields, **changes})


def test_a_request_is_what_the_submit_says() -> None:
    request = request_of(
        submit(
            generated=GENERATED,
            sampling=worker_pb2.Sampling(
                temperature=0.5, top_p=0.9, seed=2**64 - 1, logit_bias={3: -1.0}, top_logprobs=0
            ),
            stopping=worker_pb2.Stopping(max_tokens=4, min_tokens=2, token_ids=[3, 4]),
            cache_salt=b"salt",
            extensions={"quest": b"512"},
            priority=-2,
            tenant="t",
            prompt_logprobs=True,
        )
    )
    assert request.mode is Mode.RECEIVE
    assert request.prompt_ids.tolist() == [5, 6, 7]
    assert request.prompt_ids.dtype == np.int32
    assert request.generated[0].tolist() == [8, 9]
    assert (kv_tokens(request), resumed_tokens(request, 0), resumed_tokens(request, 1)) == (5, 2, 0)
    assert request.sampling.seed == 2**64 - 1
    assert request.sampling.logit_bias == {3: -1.0}
    assert request.sampling.top_logprobs == 0
    assert request.stop.token_ids == {3, 4}
    assert request.extensions == {"quest": b"512"}
    assert (request.cache_salt, request.priority, request.tenant) == (b"salt", -2, "t")


@pytest.mark.parametrize(
    "change",
    [
        {"attempt_id": b""},
        {"mode": 0},
        {"prompt_ids": b""},
        {"prompt_ids": b"x"},
        {"choices": 0},
        {"choices": 3, "generated": GENERATED},
        {"generated": GENERATED * 2},
        {"generated": GENERATED, "stopping": worker_pb2.Stopping(max_tokens=2)},
    ],
    ids=str,
)
def test_what_no_router_sends_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        request_of(submit(**change))


def test_extensions_beyond_their_bounds_are_refused() -> None:
    request_of(submit(extensions={"quest": b"x" * 4091}))
    for extensions in ({"quest": b"x" * 4092}, {f"name{index}": b"" for index in range(17)}):
        with pytest.raises(MalformedMessage):
            request_of(submit(extensions=extensions))


def record(top: int) -> TokenRecord:
    logprobs = tuple(float(np.float32(-0.1 * i)) for i in range(top))
    return TokenRecord(7, -0.5, tuple(range(top)), logprobs)


def test_token_records_survive() -> None:
    for one in (record(3), TokenRecord(9), TokenRecord(9, -0.25)):
        assert record_of(record_message(one)) == one


def test_the_payload_fits_a_notification_whatever_was_asked_for() -> None:
    assert MAX_PAYLOAD_BYTES <= ROOM_BYTES
    few = [record(20)] * 2
    assert decode_first_tokens(encode_first_tokens(few, 5, 3), 2) == (tuple(few), 5, 3)
    for choices in (64, 128, 256):
        payload = encode_first_tokens([record(20)] * choices, 1 << 60)
        assert len(payload) <= MAX_PAYLOAD_BYTES
        assert {one.token_id for one in decode_first_tokens(payload, choices).records} == {7}


def test_the_candidates_of_a_search_that_doors_let_in_fit_a_notification() -> None:
    logprobs = tuple(float(np.float32(-0.1 * i)) for i in range(MAX_BEAM_CANDIDATES))
    top = tuple(2**31 - 1 - i for i in range(MAX_BEAM_CANDIDATES))
    one = TokenRecord(2**31 - 1, -0.5, top, logprobs)
    assert decode_first_tokens(encode_first_tokens([one], 1 << 62, 1 << 30), 1).records == (one,)


@pytest.mark.parametrize("payload", [b"", b"\xff\xff", encode_first_tokens([record(1)] * 3, 0)])
def test_a_payload_that_is_none_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_first_tokens(payload, 2)


def test_endpoints_survive() -> None:
    groups = (PageGroup(4096, 10, 8), PageGroup(512, 20, 4, 40960))
    endpoint = Endpoint("agent", "nixl", b"metadata", 2**47, groups, 3, "VRAM", "a/b/1/2")
    assert endpoint_of(endpoint_message(endpoint)) == endpoint
