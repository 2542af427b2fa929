"""How a model's layers are grouped, and how many pages each group has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scheduler_bench import Bench

from engine.bounds import Bounds
from engine.groups.others import other_groups
from engine.groups.sizing import (
    bytes_of_groups,
    chunk_pages,
    pages_of_groups,
    pages_within,
    reach_of,
)
from engine.groups.spec import Full, GroupSpec, Kind, Plane, Window, name_of, split_layers
from engine.loop.load import most_sequences
from engine.model.families import read_config
from engine.pages.blocks import BlockManager
from engine.pool.kv_pool import EMPTY_HEAD_BYTES
from engine.types import FailureReason

SHAPES = Path(__file__).parents[2] / "bench" / "shapes"
PAGE = 16


def specs_of(windows: list[int | None], units: int = 8, layer_bytes: int = 1024):
    return [
        GroupSpec(name_of(kind), kind, (Plane(layers, size or EMPTY_HEAD_BYTES, "bf16"),), units)
        for kind, layers in split_layers(dict(enumerate(windows)))
        for size in [layer_bytes * len(layers)]
    ]


def bytes_held(tokens: int, groups: list[GroupSpec]) -> int:
    """Bytes of the pages that a sequence holds while it decodes."""
    pages = -(-tokens // PAGE)
    return sum(
        group.page_bytes * (min(pages, group.kind.most_pages(PAGE)) if at else pages)
        for at, group in enumerate(groups)
    )


def shape(name: str) -> tuple[list[GroupSpec], list[GroupSpec]]:
    """The groups of a public model, and the one that it had when no page was let go."""
    mixers = read_config(SHAPES / name).mixers
    layer_bytes = 2 * 2 * PAGE * mixers[0].kept.head_dim
    windows = [mixer.kept.window for mixer in mixers]
    kept = mixers[0].kept.kv_heads, layer_bytes
    return specs_of(windows, *kept), specs_of([None] * len(windows), *kept)


@pytest.mark.parametrize(
    ("windows", "kinds"),
    [
        ([None, None], [(Full(), (0, 1))]),
        ([8, None, 8], [(Full(), (1,)), (Window(8), (0, 2))]),
        ([8, 4, None], [(Full(), (2,)), (Window(8), (0,)), (Window(4), (1,))]),
        ([8, 8], [(Full(), ()), (Window(8), (0, 1))]),
        ([8, 4], [(Full(), ()), (Window(8), (0,)), (Window(4), (1,))]),
    ],
)
def test_layers_of_equal_life_are_a_group(windows, kinds):
    assert list(split_layers(dict(enumerate(windows)))) == kinds


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 18, 128])
@pytest.mark.parametrize("size", [1, 16])
def test_no_sequence_reads_more_pages_than_a_window_has(window, size):
    kind = Window(window)
    for position in range(4 * window + 40):
        first = max(0, position - window + 1) // size
        assert position // size - first + 1 <= kind.most_pages(size) - 1


@pytest.mark.parametrize(("name", "times"), [("gpt-oss-120b", 1.9), ("gemma-3-27b", 3.5)])
def test_a_long_sequence_holds_a_part_of_what_it_held(name, times):
    """Public shapes, 8,192 tokens, bfloat16."""
    groups, whole = shape(name)
    assert whole[0].page_bytes == sum(group.page_bytes for group in groups)
    held = bytes_held(8192, groups)
    assert bytes_held(8192, whole) >= times * held
    assert bytes_held(64, groups) == bytes_held(64, whole)


@pytest.mark.parametrize("name", ["gpt-oss-120b", "gemma-3-27b"])
@pytest.mark.parametrize("sequences", [1, 16, 256])
@pytest.mark.parametrize("context", [0, 1024, 65536])
def test_all_groups_fit_into_the_memory(name, sequences, context):
    groups, _ = shape(name)
    bounds = Bounds(
        max_sequences=sequences, max_step_tokens=2048, max_context_tokens=context, page_size=PAGE
    )
    for size in (8 << 30, 13 << 30, 60 << 30):
        pages = pages_within(size, groups, bounds)
        assert bytes_of_groups(pages, groups, bounds) <= size
        assert bytes_of_groups(pages + 1, groups, bounds) > size
        first, window = pages_of_groups(pages, groups, bounds)
        kind = groups[1].kind
        assert isinstance(kind, Window)
        assert first == pages
        assert window > min(kind.most_pages(PAGE) + chunk_pages(bounds), pages - 1)
        most = sequences * kind.most_pages(PAGE) * 1.25 + chunk_pages(bounds) + 1
        assert window <= min(pages, most)


def test_short_sequences_find_the_memory_that_they_found_before():
    """Where no sequence outgrows the window by much, windows may have more than half."""
    groups, whole = shape("gemma-3-27b")
    bounds = Bounds(max_sequences=256, max_step_tokens=512, max_context_tokens=1024, page_size=PAGE)
    pages, before = (pages_within(14 << 30, kinds, bounds) for kinds in (groups, whole))
    counts = pages_of_groups(pages, groups, bounds)
    assert min(counts) > 0.9 * before


@pytest.mark.parametrize("size", [8 << 30, 60 << 30])
def test_where_all_layers_have_windows_all_memory_is_for_these(size):
    """Mistral 7B v0.1: 32 layers of 8 heads of 128, windows of 4,096, contexts of 32,768."""
    groups = specs_of([4096] * 32, 8, 2 * 2 * PAGE * 128)
    bounds = Bounds(
        max_sequences=256, max_step_tokens=2048, max_context_tokens=32768, page_size=PAGE
    )
    pages = pages_within(size, groups, bounds)
    reach, window = pages_of_groups(pages, groups, bounds)
    assert 0.999 * size < bytes_of_groups(pages, groups, bounds) <= size
    assert reach * groups[0].page_bytes < 0.001 * size
    most = groups[1].kind.most_pages(PAGE)
    longest = (window - chunk_pages(bounds) - 1) // most
    assert reach // 2048 == longest >= size // (516 << 20) - 2
    assert bytes_held(32768, groups) < 517 << 20
    assert pages_of_groups(5, groups, bounds) == [5, 5], "more is never of use"
    for asked in (200, 1000, 20000):
        counts = pages_of_groups(reach_of(asked, groups, bounds), groups, bounds)
        assert asked - 1 <= counts[1] <= asked <= counts[0]


def cached(blocks: BlockManager, keys: list[bytes]) -> None:
    pages = blocks.allocate(len(keys))
    blocks.publish(pages, keys)
    blocks.release(pages)


def test_a_hit_is_what_all_groups_can_go_on_from():
    bounds = Bounds(max_sequences=2, max_step_tokens=32, max_context_tokens=640, page_size=PAGE)
    kinds: list[Kind] = [Window(24), Window(40)]
    managers = [BlockManager(40), BlockManager(40)]
    others = other_groups(bounds, kinds, managers)
    keys = [bytes([at]) for at in range(12)]
    assert others.resumable(keys, 12) == 0
    cached(managers[0], keys[2:6] + keys[7:12])
    assert others.resumable(keys, 12) == 0, "the other group has nothing"
    cached(managers[1], keys[1:6] + keys[9:12])
    assert others.resumable(keys, 12) == 12
    assert others.resumable(keys, 11) == 6, "three pages before 11 lack one, and one lacks before 7"
    assert others.resumable(keys, 5) == 5
    assert others.resumable(keys, 3) == 0
    others.begin(0, keys, 6, 11)
    assert [(own.first_page, len(own.pages)) for own in others.pages(0)] == [(4, 2), (3, 3)]
    others.passed(np.array([0]), np.array([96 + 200], np.int32))
    assert [len(own.pages) for own in others.pages(0)] == [0, 0]
    assert [manager.available for manager in managers] == [39, 39]


def test_what_prompts_share_stays_longer_than_what_one_has_passed():
    """Pages before the place that group 0 knew are evicted after those that were only passed."""
    bounds = Bounds(max_sequences=1, max_step_tokens=64, max_context_tokens=640, page_size=PAGE)
    (blocks,) = managers = [BlockManager(21)]
    others = other_groups(bounds, [Window(17)], managers)
    (group,) = others.groups
    keys = [bytes([at]) for at in range(20)]
    others.begin(0, keys, 0, 5)
    others.extend(0, 18 * PAGE)
    group.publish(group.pages(0), keys[:18])
    others.passed(np.array([0]), np.array([18 * PAGE], np.int32))
    blocks.release(blocks.allocate_apart(17))
    left = [at for at, key in enumerate(keys) if blocks.page_of(key) is not None]
    assert left[0] == 4, "the page before the fifth border"


def test_a_window_larger_than_its_group_takes_short_sequences():
    """The load report says so: else no router would send one."""
    bench = Bench(num_pages=20, windows=[(200, 12)], step_tokens=16)
    assert bench.scheduler.others.free_sequences(6, np.zeros(6, np.int32)) == 0
    assert most_sequences(bench.scheduler) == 1
    request_id = bench.submit(list(range(4, 24)), 12)
    bench.run()
    bench.check_output(request_id)
    long = bench.submit(list(range(4, 44)), 12)
    bench.turn()
    assert bench.failed[long] is FailureReason.TOO_LARGE
    bench.check_baseline()
