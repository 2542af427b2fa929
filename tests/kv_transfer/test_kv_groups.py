"""Hand-offs of pools with several groups of pages, over every transport."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from kv_world import (
    DECODE_EPOCH,
    KINDS,
    ONE,
    PAGE_TOKENS,
    THREE,
    WINDOW_PAGES,
    Transfer,
    World,
    a_world,
)

from kv_transfer.events import Delivered, PeerFailed, SendFailed, Sent
from kv_transfer.outgoing import Outgoing
from kv_transfer.ranks.plan import Side, plan
from kv_transfer.receiving import ReceiveState
from kv_transfer.specs import SendSpec, Source, Target
from kv_transfer.transports.pool import PoolMemory
from kv_transfer.types import PageGroup, TransportError
from kv_transfer.wire import Chunk, encode


def hand_over(world: World, tokens: int, held_pages: int = 0) -> Transfer:
    """Computes in chunks; what is behind a window is known when its chunk is."""
    transfer = world.begun(tokens, held_pages)
    first, *others = transfer.sources
    for end in (*range(40, tokens, 40), tokens):
        pages = -(-end // PAGE_TOKENS)
        known = [one._replace(pages=one.pages[: max(0, pages - one.first_page)]) for one in others]
        payload = b"first tokens" if end == tokens else None
        world.prefill.sender.chunk_computed(transfer.id, end, payload, [first, *known])
        world.turn()
    world.until(lambda: bool(world.decode.of(Delivered)) and bool(world.prefill.of(Sent)))
    transfer.assert_delivered()
    return transfer


@pytest.mark.parametrize("kind", [*KINDS, "loopback 4-1", "loopback 4-2"])
def test_every_group_arrives(kind: str) -> None:
    try:
        with a_world(kind, groups=THREE) as world:
            hand_over(world, 150)
            stats = world.prefill.of(Sent)[0].stats
            sizes = [group.page_bytes for group in THREE]
            assert stats.pages == 10 + WINDOW_PAGES + 1
            assert stats.bytes == np.dot(sizes, [10, WINDOW_PAGES, 1])
            assert world.decode.of(Delivered)[0].num_pages == 10
    except TransportError as error:
        if error.cause != "nixl_missing":
            raise
        pytest.skip("nixl is not here")


@pytest.mark.parametrize("held_pages", [0, 3, 8, 10])
@pytest.mark.parametrize("count", [2, 3])
def test_what_a_group_holds_is_not_sent(count: int, held_pages: int) -> None:
    """10 pages in all, of which the window has the last three."""
    with a_world("loopback", groups=THREE[:count]) as world:
        transfer = hand_over(world, 160, held_pages)
        pages = sum(target.end - target.begin for target in transfer.targets)
        assert world.prefill.of(Sent)[0].stats.pages == pages
        assert pages == 0 or held_pages < 10


def _say(
    world: World, transfer_id: bytes, group: int, first: int, end: int, *, last: bool = False
) -> ReceiveState | None:
    """The state of a transfer of 80 tokens once these pages have landed."""
    chunk = Chunk(transfer_id, DECODE_EPOCH, first, end, 80, last, group=group)
    world.prefill.transport.notify(world.decode.name, encode(chunk))
    world.settle()
    return world.decode.receiver.state(transfer_id)


def test_nothing_is_ready_before_all_groups_are() -> None:
    """The last notification and all of group 0 do not do, nor the other groups without them."""
    with a_world("loopback", groups=THREE) as world:
        transfer = world.grant(5 * PAGE_TOKENS)
        say = partial(_say, world, transfer.id)
        assert say(0, 0, 5, last=True) is ReceiveState.FILLING
        assert say(1, 2, 4) is ReceiveState.FILLING
        assert say(2, 0, 1) is ReceiveState.FILLING
        for group, first, end in ((1, 1, 2), (1, 3, 5), (2, 0, 1), (2, 1, 2), (3, 0, 1)):
            assert say(group, first, end) is ReceiveState.FILLING
        assert world.decode.counters.stale_notifications == 5
        assert say(1, 4, 5) is ReceiveState.READY


def test_a_fetch_may_be_short_of_group_0_alone() -> None:
    with a_world("loopback", groups=THREE) as world:
        transfer = world.grant_to_expect(5 * PAGE_TOKENS)
        world.decode.receiver.expect(replace(transfer.receive_spec, may_be_short=True))
        say = partial(_say, world, transfer.id)
        assert say(0, 0, 3, last=True) is ReceiveState.FILLING
        assert say(2, 0, 1) is ReceiveState.FILLING
        assert say(1, 2, 4) is ReceiveState.FILLING
        assert say(1, 4, 5) is ReceiveState.READY
        assert world.decode.of(Delivered)[0].num_pages == 3


@pytest.mark.parametrize(
    ("group", "wrong"),
    [
        (0, {"first_page": 1}),
        (0, {"is_state": True}),
        (1, {"first_page": 3}),
        (1, {"first_page": -1}),
        (1, {"held_pages": 4}),
        (2, {"pages": np.array([1, 2], np.int32)}),
        (2, {"first_page": 4}),
    ],
)
def test_a_range_that_does_not_fit_the_prompt_is_no_grant(group: int, wrong: dict) -> None:
    with a_world("loopback", groups=THREE) as world:
        transfer = world.grant(5 * PAGE_TOKENS)
        targets = list(transfer.targets)
        targets[group] = targets[group]._replace(**wrong)
        world.prefill.sender.begin(replace(transfer.spec, targets=targets))
        assert world.prefill.of(SendFailed) == [SendFailed(transfer.id, "bad_grant")]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_grant_or_a_chunk_of_other_groups_fails(count: int) -> None:
    with a_world("loopback", groups=THREE) as world:
        granted, computed = world.grant(80), world.grant(80)
        more = [*granted.targets, Target(granted.targets[2].pages, is_state=True)]
        world.prefill.sender.begin(replace(granted.spec, targets=more[:count]))
        computed.begin()
        sources = [*computed.sources, computed.sources[2]][:count]
        world.prefill.sender.chunk_computed(computed.id, 80, b"", sources)
        assert world.prefill.of(SendFailed) == [
            SendFailed(granted.id, "bad_grant"),
            SendFailed(computed.id, "bad_chunk"),
        ]


def test_pages_that_were_let_go_too_early_fail_the_hand_off() -> None:
    """The window's pages that were granted must be among those of the chunk."""
    with a_world("loopback", groups=THREE) as world:
        transfer = world.begun(80)
        first, window, state = transfer.sources
        gone = Source(window.pages[1:], window.first_page + 1)
        world.prefill.sender.chunk_computed(transfer.id, 80, b"", [first, gone, state])
        assert world.prefill.of(SendFailed) == [SendFailed(transfer.id, "bad_chunk")]


def test_groups_of_other_sizes_or_units_do_not_meet() -> None:
    shapes = {
        "page_size_mismatch": THREE[1]._replace(page_bytes=2048),
        "ranks_mismatch": THREE[1]._replace(units=4),
    }
    with a_world("loopback 2-8", met=False, groups=THREE) as world:
        own = world.decode.transport.endpoint
        for cause, group in shapes.items():
            groups = own.groups[0], group, own.groups[2]
            world.prefill.exchange.meet(replace(own, agent_name="other", groups=groups))
            assert world.prefill.of(PeerFailed)[-1].cause == cause


def test_a_pair_of_ranks_may_share_units_of_one_group_alone() -> None:
    """4 ranks to 2: of a single unit, only some write."""
    sides = Side(4), Side(2)
    assert plan(*sides, 4, (1,)).keys() - plan(*sides, 1, (1,)).keys()


@pytest.mark.parametrize(
    "groups",
    [
        (),
        (PageGroup(4096, 5),),
        (PageGroup(4096, 2), PageGroup(2048, 4, offset=4096)),
        (PageGroup(4096, 2, offset=-64), PageGroup(8192, 1, offset=8192)),
        (PageGroup(1024, 1, offset=at) for at in range(0, 16384, 1024)),
    ],
)
def test_groups_that_do_not_fit_the_pool_are_refused(groups: tuple[PageGroup, ...]) -> None:
    with pytest.raises(TransportError, match="bad_pool"):
        PoolMemory.of(torch.zeros(16384, dtype=torch.uint8), tuple(groups))
    assert PoolMemory.of(torch.zeros(ONE[0].end, dtype=torch.uint8), ONE).groups == ONE


def test_full_pushes_of_group_0_go_before_other_groups() -> None:
    """And its last one behind them."""
    pages = np.arange(1, 8, dtype=np.int32)
    targets = (Target(pages), Target(pages), Target(pages[:1], 0, 6, is_state=True))
    send = Outgoing(b"t" * 16, end_token=7 * PAGE_TOKENS, payload=b"")
    send.sources = [Source(pages), Source(pages), Source(pages[:1], 6)]
    send.begin(SendSpec(b"t" * 16, "peer", 1, targets, 7 * PAGE_TOKENS, PAGE_TOKENS))
    posted = []
    while (found := send.next_range([3, 5, 5])) is not None:
        posted.append((found.group, found.first, found.end, found.is_last))
        send.mark_posted(found, 0)
    others = [(2, 6, 7, False), (1, 0, 5, False), (1, 5, 7, False)]
    assert posted == [(0, 0, 3, False), (0, 3, 6, False), *others, (0, 6, 7, True)]
