"""Pages through staging buffers of every size and number, gathered, sent, scattered in pieces."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
from kv_world import NUM_PAGES, PAGE_BYTES, PAGE_TOKENS, World, a_world

from kv_transfer.events import Delivered, Sent
from kv_transfer.factory import TRANSPORTS
from kv_transfer.lanes import RAMP, LaneOptions, cut
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


@pytest.mark.parametrize("most", [1, 7, 8, 64])
@pytest.mark.parametrize("num_pages", [1, 2, 8, 9, 63, 64, 65, 1000])
def test_pieces_grow_and_shrink_and_cover_a_batch(num_pages: int, most: int) -> None:
    parts = list(cut(num_pages, most))
    assert [page for part in parts for page in range(num_pages)[part]] == list(range(num_pages))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) <= most
    assert max(sizes[0], sizes[-1]) <= max(1, most // RAMP)
    assert all(b <= 2 * a for a, b in itertools.pairwise(sizes)), "they double at most"


def test_a_long_batch_goes_in_pieces_of_the_largest_size() -> None:
    sizes = [part.stop - part.start for part in cut(512, 64)]
    assert sizes == [8, 16, 32, 64, 64, 64, 64, 64, 64, 36, 18, 9, 8, 1]
