"""One worker gets pages from another. What the pages hold decides the output (`worker_kit`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from engine_fakes import VOCAB
from waiting import until
from worker_kit import PAGE_TOKENS, WHOLE, Attempted, Ear, Pair, a_pair

from baton.worker.v1 import worker_pb2
from fetch_service.outcomes import REFUSALS
from kv_transfer.types import TransportError
from router.workers.between import HOLDER_GONE


class Fetching:
    """A pair whose first node gets pages from the second, and the router between them."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.fetcher, self.holder = pair.p, pair.d
        self.passes_on = True
        self.said: list[tuple[str, Any]] = []
        self._tasks = [
            asyncio.create_task(self._pass("fetch")),
            asyncio.create_task(self._pass("fetch_refused")),
        ]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def hold(self, prompt: Sequence[int], salt: bytes = b"") -> None:
        """The holder computes a prompt, and keeps its pages."""
        attempt = Attempted(prompt=prompt, salt=salt, max_tokens=1)
        self.holder.decode.submit(attempt.message(WHOLE), self.pair.from_d.outbox)
        await self.pair.from_d.heard("finished", attempt.id)
        await until(lambda: self.holder.is_quiet)

    async def held(self, pages: int, **options: Any) -> list[int]:
        """A prompt of so many pages that the holder has."""
        prompt = prompt_of(pages, **options)
        await self.hold(prompt)
        return prompt

    def ask(self, prompt: Sequence[int], pages: int | None = None, **options: Any) -> Attempted:
        """The fetcher gets a prompt, and the word that the other holds pages of it."""
        pages = len(prompt) // PAGE_TOKENS if pages is None else pages
        attempt = Attempted(prompt=prompt, fetch=(self.holder.name, pages), **options)
        self.fetcher.decode.submit(attempt.message(WHOLE), self.pair.from_p.outbox)
        return attempt

    async def answered(self, attempt: Attempted) -> int:
        """Waits for the right answer; returns how many tokens of the prompt were found."""
        finished = await self.pair.from_p.heard("finished", attempt.id)
        assert self.pair.from_p.tokens[attempt.id, 0] == attempt.expected
        return finished.timings.cached_prompt_tokens

    def outcomes(self, metric: str = "baton_kv_fetches_total") -> dict[str, float]:
        found: dict[str, float] = {}
        for family in self.fetcher.metrics.registry.collect():
            for sample in family.samples:
                if sample.name == metric:
                    found |= {next(iter(sample.labels.values())): sample.value}
        return found

    async def quiet(self) -> None:
        await self.pair.quiet()

    async def _pass(self, kind: str) -> None:
        """Passes that kind of message on, as a router does."""
        ear = self.pair.from_p if kind == "fetch" else self.pair.from_d
        done = 0
        while True:
            while len(said(ear, kind)) <= done:
                await asyncio.sleep(0.002)
            message = said(ear, kind)[done]
            done += 1
            self.said.append((kind, message))
            if not self.passes_on:
                continue
            if kind == "fetch":
                self.holder.holding.asked(message, self.pair.from_d.outbox)
            else:
                self.fetcher.fetching.refused(message)


@asynccontextmanager
async def fetching(**options: Any) -> AsyncIterator[Fetching]:
    async with a_pair(**options) as pair:
        made = Fetching(pair)
        try:
            yield made
            await made.quiet()
        finally:
            made.close()


def said(ear: Ear, kind: str) -> list[Any]:
    """Messages of that kind; they name no attempt."""
    return [message for name, message in ear.history if name == kind]


def prompt_of(pages: int, more: int = 2, seed: int = 1) -> list[int]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, pages * PAGE_TOKENS + more).tolist()


async def test_pages_come_from_another_worker_and_the_rest_is_computed() -> None:
    async with fetching() as made:
        prompt = await made.held(4)
        attempt = made.ask(prompt)
        assert await made.answered(attempt) == 4 * PAGE_TOKENS
        assert made.outcomes() == {"fetched": 1}
        assert made.outcomes("baton_kv_fetch_pages_total") == {"got": 4}


async def test_the_prompt_of_a_hand_off_may_come_from_the_worker_that_will_decode_it() -> None:
    """The next turn of a conversation: P gets from D what it lacks, and hands over the rest."""
    async with fetching() as made:
        prompt = await made.held(4)
        attempt = Attempted(prompt=[*prompt, 1, 2, 3, 4, 5], fetch=(made.holder.name, 5))
        await made.pair.run(attempt)
        assert made.pair.from_d.tokens[attempt.id, 0] == attempt.expected
        done = await made.pair.from_p.heard("prefill_done", attempt.id)
        assert done.cached_prompt_tokens == 4 * PAGE_TOKENS


async def test_what_the_holder_lacks_is_computed() -> None:
    async with fetching() as made:
        prompt = await made.held(2)
        attempt = made.ask([*prompt[: 2 * PAGE_TOKENS], *prompt_of(2, seed=2)])
        assert await made.answered(attempt) == 2 * PAGE_TOKENS
        assert made.outcomes() == {"short": 1}


async def test_a_holder_without_any_of_the_keys_says_so() -> None:
    """The router's index may be stale. No time passes, and the pages are free at once."""
    async with fetching() as made:
        attempt = made.ask(prompt_of(4))
        assert await made.answered(attempt) == 0
        assert made.outcomes() == {"missing": 1}
        assert not made.outcomes("baton_kv_fetch_pages_total")


async def test_tenants_share_nothing() -> None:
    async with fetching() as made:
        prompt = prompt_of(4)
        await made.hold(prompt, salt=b"one")
        attempt = made.ask(prompt, salt=b"other")
        assert await made.answered(attempt) == 0
        assert made.outcomes() == {"missing": 1}
        again = made.ask(prompt, salt=b"one")
        assert await made.answered(again) == 4 * PAGE_TOKENS


async def test_an_edited_turn_shares_what_lies_before_the_edit() -> None:
    async with fetching() as made:
        prompt = await made.held(5)
        edited = [*prompt[:9], (prompt[9] + 1) % VOCAB, *prompt[10:]]
        assert await made.answered(made.ask(edited)) == 2 * PAGE_TOKENS
        stripped = [*prompt[:6], *prompt[11:]]
        assert await made.answered(made.ask(stripped)) == PAGE_TOKENS


async def test_a_late_fetch_is_computed_and_its_pages_wait_for_the_writer() -> None:
    async with fetching(least_fetch_s=0.2) as made:
        prompt = await made.held(4)
        made.holder.transport.holds = True
        attempt = made.ask(prompt)
        await until(lambda: made.holder.held_pages == 4)
        assert await made.answered(attempt) == 0
        assert made.outcomes() == {"late": 1}
        assert made.fetcher.fetching.latency_s >= 0.2, "else a router would choose it ever again"
        load = made.fetcher.engine.load()
        assert load.quarantined_pages == 4
        assert made.fetcher.services.overdue().oldest_quarantine_s > 0
        assert made.holder.services.overdue().oldest_send_s > 0
        written = Attempted(40)
        made.fetcher.decode.submit(written.message(WHOLE), made.pair.from_p.outbox)
        await made.answered(written)
        made.holder.transport.holds = False  # The late write lands, in nobody's pages.
        await until(lambda: not made.fetcher.engine.load().quarantined_pages)


async def test_a_slow_fetch_is_held_against_fetches_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router sends fetches where they are sooner. After a slow one it would send no others, and
    none could show that they are fast."""
    async with fetching() as made:
        prompt = await made.held(4)
        made.holder.transport.delay_s = 0.2
        await made.answered(made.ask(prompt))
        assert made.fetcher.fetching.latency_s >= 0.2
        monkeypatch.setattr("fetch_service.fetching.FRESH_S", 0.0, raising=False)
        assert made.fetcher.fetching.latency_s == 0.0


async def test_what_came_before_the_time_was_up_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_transfer.sending.MAX_PUSH_BYTES", {"DRAM": 2 * 8 * PAGE_TOKENS})
    async with fetching(least_fetch_s=0.5) as made:
        prompt = await made.held(5)
        made.holder.transport.holds = True
        attempt = made.ask(prompt)
        await until(lambda: made.holder.held_pages == 5)
        made.holder.transport.land(made.holder.transport.held_pushes[0])
        assert await made.answered(attempt) == 2 * PAGE_TOKENS
        assert made.fetcher.engine.load().quarantined_pages == 3
        made.holder.transport.holds = False


async def test_a_dead_holder_frees_what_it_could_write() -> None:
    async with fetching(least_fetch_s=0.2) as made:
        prompt = await made.held(4)
        await asyncio.to_thread(made.holder.transfer.stop, 5.0)
        attempt = made.ask(prompt)
        assert await made.answered(attempt) == 0
        await asyncio.sleep(0.1)
        assert made.fetcher.engine.load().quarantined_pages == 4  # Nobody answers for it.
        made.fetcher.peers.part(made.holder.name, True, None)
        await until(lambda: not made.fetcher.engine.load().quarantined_pages)
        made.holder.engine.fetching.let_go(made.said[0][1].transfer_id)
        made.holder.holding._holds.clear()


async def test_a_cancelled_request_leaves_nothing_behind() -> None:
    async with fetching() as made:
        prompt = await made.held(4)
        made.holder.transport.holds = True
        attempt = made.ask(prompt)
        await until(lambda: made.holder.held_pages == 4)
        made.fetcher.decode.cancel(attempt.id, made.pair.from_p.outbox)
        made.holder.transport.holds = False
        await made.quiet()
        again = made.ask(prompt)
        assert await made.answered(again) == 4 * PAGE_TOKENS  # They came all the same.


async def test_fetches_have_an_eighth_of_the_pool() -> None:
    async with fetching(num_pages=49) as made:
        prompt = await made.held(10)
        assert await made.answered(made.ask(prompt)) == 6 * PAGE_TOKENS


async def test_a_holder_gives_an_eighth_of_its_pool() -> None:
    async with fetching(d_num_pages=33, p_num_pages=97) as made:
        prompt = await made.held(10)
        assert await made.answered(made.ask(prompt)) == 4 * PAGE_TOKENS
        assert made.outcomes() == {"short": 1}


async def test_a_fetch_of_nobody_known_is_computed() -> None:
    async with fetching() as made:
        attempt = Attempted(18, fetch=("nobody-1", 4))
        made.fetcher.decode.submit(attempt.message(WHOLE), made.pair.from_p.outbox)
        assert await made.answered(attempt) == 0
        assert made.outcomes() == {"no_path": 1}
        assert not made.said


async def test_a_path_that_breaks_is_not_waited_for() -> None:
    async with fetching() as made:
        prompt = await made.held(4)
        made.holder.transport.holds = True
        attempt = made.ask(prompt)
        await until(lambda: made.holder.held_pages == 4)
        made.fetcher.transfer._commands.put(
            lambda exchange: exchange.peers.lost(made.holder.name, "disconnected")
        )
        assert await made.answered(attempt) == 0
        assert made.outcomes() == {"no_path": 1}
        made.holder.transport.holds = False


async def test_what_a_holder_cannot_send_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path breaks behind the first push. The other side cannot see that."""
    monkeypatch.setattr("kv_transfer.sending.MAX_PUSH_BYTES", {"DRAM": 2 * 8 * PAGE_TOKENS})
    async with fetching() as made:
        prompt = await made.held(5)
        transport = made.holder.transport
        push, calls = transport.push, []

        def breaking(*arguments: Any) -> int:
            calls.append(arguments)
            if len(calls) == 2:
                raise TransportError("disconnected", "cut")
            return push(*arguments)

        monkeypatch.setattr(transport, "push", breaking)
        assert await made.answered(made.ask(prompt)) == 2 * PAGE_TOKENS
        assert made.outcomes() == {"no_path": 1}


async def test_malformed_fetches_are_refused() -> None:
    async with fetching() as made:
        good = worker_pb2.Fetch(
            transfer_id=b"t" * 16,
            fetcher_epoch=made.fetcher.epoch,
            fetcher_agent_name=made.fetcher.name,
            holder_agent_name=made.holder.name,
            keys=b"k" * 64,
            page_ids=b"\1\0\0\0\2\0\0\0",
        )
        for number, change in enumerate(({"keys": b"k" * 63}, {"keys": b""}, {"page_ids": b"x"})):
            bad = worker_pb2.Fetch()
            bad.CopyFrom(good)
            bad.transfer_id = bytes([number]) * 16
            for name, value in change.items():
                setattr(bad, name, value)
            made.holder.holding.asked(bad, made.pair.from_d.outbox)
        await until(lambda: len(said(made.pair.from_d, "fetch_refused")) == 3)
        assert {m.cause for m in said(made.pair.from_d, "fetch_refused")} == {"malformed"}


@pytest.mark.parametrize("cause", ["", "late", "fetched", "a newer word", "x" * 1000, "no_path"])
async def test_a_cause_becomes_a_label_only_if_it_is_known(cause: str) -> None:
    async with fetching() as made:
        made.passes_on = False
        prompt = prompt_of(4)
        attempt = made.ask(prompt)
        await until(lambda: made.said)
        (_, fetch), *_ = made.said
        refused = worker_pb2.FetchRefused(
            transfer_id=fetch.transfer_id,
            fetcher_epoch=made.fetcher.epoch,
            holder_agent_name=made.holder.name,
            cause=cause,
        )
        made.fetcher.fetching.refused(refused)
        assert await made.answered(attempt) == 0
        assert made.outcomes() == {"no_path" if cause == "no_path" else "other": 1}
        assert made.fetcher.fetching.latency_s == 0.0


def test_routers_refuse_for_a_known_cause() -> None:
    assert HOLDER_GONE in REFUSALS


async def test_a_refusal_of_somebody_else_changes_nothing() -> None:
    async with fetching() as made:
        prompt = await made.held(4)
        made.holder.transport.holds = True
        attempt = made.ask(prompt)
        await until(lambda: made.holder.held_pages == 4)
        (_, fetch), *_ = made.said
        for epoch, holder in ((1, made.holder.name), (made.fetcher.epoch, "somebody")):
            refused = worker_pb2.FetchRefused(
                transfer_id=fetch.transfer_id, fetcher_epoch=epoch, holder_agent_name=holder
            )
            made.fetcher.fetching.refused(refused)
        made.holder.transport.holds = False
        assert await made.answered(attempt) == 4 * PAGE_TOKENS


async def test_random_fetches_leave_nothing_behind() -> None:
    """Prompts that share parts, both ways, with cancels, in small pools."""
    rng = np.random.default_rng(5)
    async with fetching(num_pages=41, least_fetch_s=0.3) as made:
        bases = [prompt_of(6, seed=seed) for seed in range(3)]
        attempts = []
        for _ in range(40):
            base = bases[rng.integers(3)]
            prompt = [*base[: rng.integers(1, 26)], *rng.integers(0, VOCAB, 3).tolist()]
            if rng.random() < 0.3:
                attempt = Attempted(prompt=prompt, max_tokens=2)
                made.holder.decode.submit(attempt.message(WHOLE), made.pair.from_d.outbox)
                continue
            made.holder.transport.delay_s = float(rng.choice([0.0, 0.02, 0.4]))
            attempt = made.ask(prompt, pages=int(rng.integers(1, 7)), max_tokens=3)
            if rng.random() < 0.2:
                await asyncio.sleep(0.01)
                made.fetcher.decode.cancel(attempt.id, made.pair.from_p.outbox)
            else:
                attempts.append(attempt)
        for attempt in attempts:
            await made.answered(attempt)
        made.holder.transport.delay_s = 0.0


WINDOWS = ((5, 61), (17, 81))
"""Tokens and pages of each. A prompt goes on behind a page with the last page of the one and four
pages of the other."""


async def test_a_resume_point_of_several_groups_comes_whole() -> None:
    """A wrong page, of any group, would make a wrong token."""
    async with fetching(windows=WINDOWS, num_pages=121) as made:
        prompt = await made.held(12)
        assert await made.answered(made.ask([*prompt, 7, 8])) == 12 * PAGE_TOKENS
        assert made.outcomes() == {"fetched": 1}
        assert made.outcomes("baton_kv_fetch_pages_total") == {"got": 12 + 1 + 4}
        # A prompt that parts earlier has all of group 0, and lacks three pages of windows.
        assert await made.answered(made.ask([*prompt[:40], 1, 2], pages=10)) == 10 * PAGE_TOKENS
        assert made.outcomes("baton_kv_fetch_pages_total") == {"got": 17 + 3}


async def test_a_group_that_the_holder_lacks_makes_it_give_nothing() -> None:
    async with fetching(windows=WINDOWS, num_pages=121) as made:
        prompt = await made.held(12)
        blocks = made.holder.scheduler.others.groups[1].blocks
        blocks.release(blocks.allocate(blocks.total))  # All that is cached is evicted.
        assert await made.answered(made.ask(prompt)) == 0
        assert made.outcomes() == {"missing": 1}
        made.holder.scheduler.check_invariants()


async def test_what_broke_off_is_no_resume_point_and_waits_for_the_writer() -> None:
    """All pages of windows land, and none of group 0: the last of them carries the word."""
    async with fetching(windows=WINDOWS, num_pages=121, least_fetch_s=0.5) as made:
        prompt = await made.held(12)
        made.holder.transport.holds = True
        attempt = made.ask(prompt)
        await until(lambda: made.holder.held_pages == 17)
        for push in made.holder.transport.held_pushes[:2]:
            made.holder.transport.land(push)
        assert await made.answered(attempt) == 0
        assert made.outcomes() == {"late": 1}
        free = [group.total_pages - group.free_pages for group in made.fetcher.engine.load().groups]
        assert free[1] >= 1
        assert free[2] >= 4
        made.holder.transport.holds = False
        await made.quiet()
        assert await made.answered(made.ask([*prompt, 1])) == 12 * PAGE_TOKENS


async def test_a_malformed_fetch_of_groups_is_refused() -> None:
    async with fetching(windows=WINDOWS) as made:
        fetch = worker_pb2.Fetch(
            transfer_id=b"f" * 16,
            fetcher_epoch=made.fetcher.epoch,
            fetcher_agent_name=made.fetcher.name,
            holder_agent_name=made.holder.name,
            keys=bytes(32),
            page_ids=bytes(4),
        )
        half = worker_pb2.GroupFetch(keys=bytes(32), page_ids=bytes(4))
        wrong = worker_pb2.GroupFetch(keys=bytes(33), page_ids=bytes(4))
        for number, groups in enumerate(([], [half], [half, wrong], [half] * 3)):
            fetch.transfer_id = bytes([number]) * 16
            del fetch.groups[:]
            fetch.groups.extend(groups)
            made.holder.holding.asked(fetch, made.pair.from_d.outbox)
        await until(lambda: len(said(made.pair.from_d, "fetch_refused")) == 4)
        assert {one.cause for one in said(made.pair.from_d, "fetch_refused")} == {"malformed"}
