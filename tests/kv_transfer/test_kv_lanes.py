"""Pages through staging buffers of every size and number, gathered, sent, scattered in pieces."""

from __future__ import annotations

from functools import partial

import pytest
from kv_world import NUM_PAGES, PAGE_BYTES, PAGE_TOKENS, World, a_world

from kv_transfer.events import Delivered, Sent
from kv_transfer.factory import TRANSPORTS
from kv_transfer.lanes import LaneOptions
from kv_transfer.nccl import NcclTransport


@pytest.mark.parametrize(
    "lanes",
    [
        LaneOptions(piece_bytes=1, slots=1),
        LaneOptions(piece_bytes=3 * PAGE_BYTES + 1, slots=1),
        LaneOptions(piece_bytes=5 * PAGE_BYTES, slots=2),
        LaneOptions(piece_bytes=NUM_PAGES * PAGE_BYTES, slots=3),
    ],
)
def test_every_piece_arrives_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch, lanes: LaneOptions
) -> None:
    monkeypatch.setitem(TRANSPORTS, "nccl", partial(NcclTransport, lanes=lanes))
    with a_world("nccl") as world:
        for num_pages in (1, 14, NUM_PAGES - 1):
            send(world, num_pages)


def send(world: World, num_pages: int) -> None:
    before = len(world.decode.of(Delivered))
    world.decode.pool.zero_()
    transfer = world.grant(num_pages * PAGE_TOKENS)
    transfer.begin()
    transfer.finish()
    world.until(lambda: len(world.decode.of(Delivered)) == before + 1)
    world.until(lambda: len(world.prefill.of(Sent)) == before + 1)
    transfer.assert_delivered()
    written = world.decode.pool.any(dim=1).sum()
    assert written == num_pages, "pages were written that nobody granted"
