"""Bytes for hooks of workers: who takes them, and where they go."""

from __future__ import annotations

import pytest
from frontdoor_kit import served_model
from scripted_worker import BOTH, DECODE, PREFILL, Cluster, job, tokens_of

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from router.errors import RouterError
from router.requests import validation
from router.requests.validation import Limits


@pytest.fixture
def usual() -> dict[str, object]:
    return {"local_prefill": "never"}


def violations(**extensions: bytes) -> list[tuple[str, str]]:
    prompt = api.GenerationInput(token_ids=api.TokenIds(ids=[70]), extensions=extensions)
    found = validation.check_request(api.GenerateRequest(input=prompt), Limits())
    validation.check_against_model(found, prompt, served_model("/nowhere"))
    return [(violation.field, violation.description) for violation in found.found]


def test_names_that_no_worker_has_and_too_many_bytes_are_refused() -> None:
    assert violations(quest=b"512") == []
    assert violations(quest=b"x" * (4096 - len("quest"))) == []
    ((field, rule),) = violations(quest=b"x" * 4096)
    assert (field, rule) == ("input.extensions", "must have at most 4096 bytes with its names")
    ((field, rule),) = violations(other=b"")
    assert field == "input.extensions"
    assert rule.endswith("those that they have: quest")
    ((field, rule),) = violations(**{f"name{index}": b"" for index in range(17)})
    assert rule == "must have at most 16 names"


async def test_the_worker_that_has_the_hook_gets_the_bytes(cluster: Cluster) -> None:
    plain = await cluster.add("b0", BOTH)
    having = await cluster.add("b1", BOTH, extensions=("quest",))
    assert cluster.dispatcher.model("tiny").extensions == {"quest"}
    for _ in range(4):
        reader = cluster.read(job(max_tokens=1, extensions={"quest": b"512"}))
        submit = await having.heard("submit")
        assert submit.extensions == {"quest": b"512"}
        having.first_token(submit.attempt_id, 10)
        having.finished(submit.attempt_id, 1)
        assert tokens_of(await reader.end()) == [10]
    assert plain.count("submit") == 0


@pytest.mark.parametrize(
    ("of_prefill", "of_decode", "taken"),
    [
        (("quest",), ("quest",), {"quest"}),
        (("quest",), (), set()),
        ((), ("quest",), set()),
        (("quest", "other"), ("other",), {"other"}),
    ],
)
async def test_both_ends_of_a_hand_off_must_have_the_hook(
    cluster: Cluster, of_prefill: tuple[str], of_decode: tuple[str], taken: set[str]
) -> None:
    await cluster.add("p0", PREFILL, extensions=of_prefill)
    await cluster.add("d0", DECODE, extensions=of_decode)
    assert cluster.dispatcher.model("tiny").extensions == taken


async def test_a_hook_that_failed_is_named(cluster: Cluster) -> None:
    worker = await cluster.add("b0", BOTH, extensions=("quest",))
    for reason, words in (
        (worker_pb2.FAILURE_REASON_HOOK, "HOOK_FAILED: the hook quest failed"),
        (worker_pb2.FAILURE_REASON_EXTENSION, "INVALID_FIELD"),
    ):
        reader = cluster.read(job(extensions={"quest": b"512"}))
        worker.failed((await worker.heard("submit")).attempt_id, reason, "quest")
        with pytest.raises(RouterError, match=words) as refused:
            await reader.end()
        if reason == worker_pb2.FAILURE_REASON_EXTENSION:
            assert [one.field for one in refused.value.violations] == ["input.extensions.quest"]
