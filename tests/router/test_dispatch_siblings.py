"""Prompts that begin like one that was just routed, and go where its pages are or soon will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from scripted_worker import Cluster, job, tokens_of
from test_dispatch_local import HAND_OFF, WHOLE, take_over

if TYPE_CHECKING:
    from scripted_worker import ScriptedWorker

    from router.jobs import Job


def sibling() -> Job:
    """Four pages."""
    return job(prompt_tokens=65, max_tokens=2, keys=np.arange(1, 5, dtype=np.uint64))


async def long_queue(cluster: Cluster) -> tuple[ScriptedWorker, ScriptedWorker]:
    """A prefill worker that has 10 s of work before it, and a decode worker that has none. Both are
    as fast, and neither reports by itself."""
    prefill, decode = await cluster.pair()
    prefill.reports_by_itself = decode.reports_by_itself = False
    rate = {"prefill_tokens_per_s": 100, "prefill_credit_tokens": 4096}
    prefill.report(queued_prefill_tokens=1000, **rate)
    decode.report(**rate)
    await cluster.caught_up(prefill)
    await cluster.caught_up(decode)
    return prefill, decode


async def test_a_sibling_does_not_go_where_the_pages_are_yet_to_come(cluster: Cluster) -> None:
    """The decode worker would compute all of it beside its streams."""
    prefill, decode = await long_queue(cluster)
    readers = [cluster.read(sibling())]
    attempt = (await prefill.heard("submit")).attempt_id
    assert (await decode.heard("submit")).mode == HAND_OFF
    readers.append(cluster.read(sibling()))
    assert (await decode.heard("submit")).mode == HAND_OFF
    assert (await prefill.heard("submit")).attempt_id != attempt
    for reader in readers:
        await reader.leave()


@pytest.mark.parametrize("comes", ["beside", "after"])
async def test_what_follows_a_hand_off_at_once_goes_to_the_decode_worker(
    cluster: Cluster, comes: str
) -> None:
    """A sibling, and the next turn of the conversation, of which the worker has not reported yet:
    it may do so up to 50 ms later."""
    prefill, decode = await long_queue(cluster)
    first = cluster.read(sibling())
    attempt = (await prefill.heard("submit")).attempt_id
    await decode.heard("submit")
    decode.delivered(attempt)
    if comes == "after":
        prefill.prefill_done(attempt)
        decode.tokens(attempt, 0, 10, 11)
        decode.finished(attempt, 2)
        assert tokens_of(await first.end()) == [10, 11]
    await cluster.caught_up(decode)
    keys = np.arange(1, 6, dtype=np.uint64)
    second = cluster.read(job(prompt_tokens=90, keys=keys) if comes == "after" else sibling())
    assert (await decode.heard("submit")).mode == WHOLE
    for reader in (first, second):
        await reader.leave()


async def test_a_sibling_goes_to_the_decode_worker_that_took_over(cluster: Cluster) -> None:
    """And not to the prefill worker, which was let go."""
    prefill, decode = await long_queue(cluster)
    first = cluster.read(sibling())
    attempt = (await prefill.heard("submit")).attempt_id
    await decode.heard("submit")
    take_over(decode, attempt)
    await prefill.heard("cancel")
    prefill.report(queued_prefill_tokens=0)
    await cluster.caught_up(prefill)
    second = cluster.read(sibling())
    assert (await decode.heard("submit")).mode == WHOLE
    for reader in (first, second):
        await reader.leave()
