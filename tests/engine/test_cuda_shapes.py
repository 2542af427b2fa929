"""Shapes, what pads a step to one, and the packed copy, on any device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention.fa3 import LONG_PIECE
from engine.bounds import Bounds
from engine.cuda.groups.sizes import agreed, ask_of
from engine.cuda.steps.packing import PackedStep, Width, pack
from engine.cuda.steps.shapes import (
    CHUNKS,
    LONGEST_GRAPH,
    PROMPT_ROWS,
    Shape,
    Shapes,
    bucket_of,
    bucket_sizes,
)
from engine.cuda.steps.staging import ALIGNMENT, StagingError, StepStaging
from engine.groups.spec import Window
from engine.step.plan import GroupTable, ScorePlan, StepPlan

PAGE_SIZE = 4
NOBODY = 99
NOTHING = np.zeros(0, np.int32)


@pytest.mark.parametrize("most", [1, 3, 9, 256, 300])
def test_every_batch_has_a_bucket_that_wastes_little(most):
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, most + 1):
        bucket = bucket_of(rows, sizes)
        assert bucket is not None
        assert rows <= bucket < rows + 8
        assert all(size < rows for size in sizes if size < bucket)


def test_small_batches_have_buckets_of_their_own():
    sizes = bucket_sizes(256)
    assert [bucket_of(rows, sizes) for rows in (1, 2, 3, 5, 8, 9, 64, 256)] == [
        1, 2, 4, 8, 8, 16, 64, 256,
    ]  # fmt: skip


def test_workers_of_a_group_agree_on_the_rows_of_all():
    """Graphs where all have one, and all tokens where one has none. Buckets are alike."""
    shapes = Shapes(Bounds(max_sequences=20, max_step_tokens=512), 2, prompts=False)
    assert not any(shape.prompt_rows for shape in shapes.all)
    few, many, chunk = step(3), step(17), step(2, (0, 100))
    assert ask_of(few, shapes) == [3, 4]
    assert ask_of(chunk, shapes) == [102, 0]
    size = agreed({0: ask_of(few, shapes), 2: ask_of(many, shapes)})
    assert size == (24, True)
    shape = shapes.of(few)
    assert shape is not None
    assert shapes.grown(shape, size.rows) in shapes.all
    assert agreed({0: ask_of(many, shapes), 1: ask_of(chunk, shapes)}) == (102, False)
    alone = Shapes(Bounds(decodes=False), 2, prompts=False).all
    assert [shape.decodes for shape in alone] == [1], "what a step of padding has"


def step(decodes: int, *prompts: tuple[int, int], last: bool = True, scored: bool = False):
    """Decode rows at positions 10, 11, ..., then pieces of prompts, each [start, end); all but the
    last piece are a prompt's end, and that one unless told."""
    starts = [10 + row for row in range(decodes)] + [start for start, _ in prompts]
    ends = [11 + row for row in range(decodes)] + [end for _, end in prompts]
    lens = np.subtract(ends, starts).astype(np.int32)
    rows, columns = len(lens), max(ends) // PAGE_SIZE + 1
    drawn = rows if last else rows - 1
    slots = np.arange(rows, dtype=np.int32) + 20
    positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
    return StepPlan(
        number=0, token_ids=np.arange(lens.sum(), dtype=np.int32) + 500,
        positions=np.concatenate(positions).astype(np.int32), row_slots=slots, query_lens=lens,
        context_lens=np.array(ends, np.int32), num_decodes=decodes,
        page_table=np.arange(1, rows * columns + 1, dtype=np.int32).reshape(rows, columns),
        sample_tokens=(lens.cumsum() - 1)[:drawn].astype(np.int32), sample_slots=slots[:drawn],
        sample_generations=slots[:drawn], sample_indices=slots[:drawn], sample=None,
        copy_source=NOTHING, copy_target=NOTHING, write_slots=NOTHING, write_tokens=NOTHING,
        scores=(ScorePlan(0, NOTHING, 0),) if scored else (),
        successors=np.array([-1 if last or row < rows - 1 else 77 for row in range(decodes, rows)],
                            np.int32), drafted_from=np.zeros(rows, np.int32),
    )  # fmt: skip


KV_HEADS = 8
WINDOW = Window(6)


def windowed(plan: StepPlan) -> StepPlan:
    """The step with a group of a window, whose pages have numbers of their own."""
    starts = plan.context_lens - plan.query_lens
    skipped = np.maximum(starts - WINDOW.tokens + 1, 0) // PAGE_SIZE
    used = -(-plan.context_lens // PAGE_SIZE) - skipped
    at = np.arange(used.max())
    columns = np.minimum(skipped[:, None] + at, plan.page_table.shape[1] - 1)
    pages = np.take_along_axis(plan.page_table, columns, 1) + 1000
    pages = np.where(at < used[:, None], pages, 0).astype(np.int32)
    return replace(plan, others=(GroupTable(pages, skipped, NOTHING, NOTHING),))


def width_of(shape: Shape) -> int:
    return WINDOW.most_pages(PAGE_SIZE) + -(-shape.prompt_tokens // PAGE_SIZE)


def shapes_of(
    max_sequences: int, max_step_tokens: int = 2048, decodes: bool = True, narrows: bool = False
) -> Shapes:
    return Shapes(
        Bounds(
            max_sequences=max_sequences,
            max_step_tokens=max_step_tokens,
            max_context_tokens=4096,
            decodes=decodes,
        ),
        KV_HEADS,
        narrows=narrows,
    )


def test_many_rows_have_two_graphs_and_lengths_choose() -> None:
    shapes = shapes_of(64)
    for shape in shapes.all:
        two = shape.decodes > 4 and not shape.prompt_rows
        assert (shape._replace(differ=False) in shapes.all) is two
        assert shape._replace(differ=True) in shapes.all
    for prompts in ([], [(0, 64)]):
        alike = step(40, *prompts)
        differs = replace(alike, context_lens=alike.context_lens.copy())
        alike.context_lens[:] = 3000
        differs.context_lens[:] = 100
        differs.context_lens[5] = 3000
        of_alike, of_different = shapes.of(alike), shapes.of(differs)
        assert of_alike is not None
        assert of_alike.differ is bool(prompts)
        assert of_different == of_alike._replace(differ=True)
        assert of_alike in shapes.all


def test_steps_with_narrowed_rows_have_graphs_of_their_own() -> None:
    plain, shapes = shapes_of(64), shapes_of(64, narrows=True)
    narrowed = [shape for shape in shapes.all if shape.narrowed]
    assert [shape for shape in shapes.all if not shape.narrowed] == plain.all
    assert {shape._replace(narrowed=False) for shape in narrowed} == {
        shape
        for shape in plain.all
        if not shape.prompt_rows or (shape.decodes and shape.prompt_tokens == CHUNKS[-1])
    }
    plan, reads = step(40), np.full(40, 2000, np.int32)
    assert shapes.of(plan) == plain.of(plan)
    found = shapes.of(plan, reads)
    assert found is not None
    assert found == Shape(40, differ=False, narrowed=True)
    reads[3] = 20000
    assert shapes.of(plan, reads) == found._replace(differ=True)
    for piece in (1, 64, CHUNKS[-1]):
        beside = shapes.of(step(40, (0, piece)), reads)
        assert beside == Shape(64, PROMPT_ROWS + 1, CHUNKS[-1], narrowed=True)
        assert beside in shapes.all
    assert shapes.of(step(40, (0, CHUNKS[-1] + 1)), reads) is None
    assert plain.of(plan, reads) is None


@pytest.mark.parametrize("most", [1, 8, 40])
def test_the_shape_of_a_step_holds_it_and_has_a_graph(most):
    shapes = shapes_of(most)
    assert [s.tokens for s in shapes.all] == sorted((s.tokens for s in shapes.all), reverse=True)
    assert len(set(shapes.all)) == len(shapes.all)
    for decodes in range(most + 1):
        pieces = [[(8, 8 + most)] for most in CHUNKS]
        for prompts in ([], [(0, 1)], *pieces, [(0, 9)] * PROMPT_ROWS):
            if not decodes and not prompts:
                continue
            plan = step(decodes, *prompts)
            shape = shapes.of(plan)
            assert shape in shapes.all
            assert decodes <= shape.decodes < decodes + 33
            padding = shape.prompt_tokens - (plan.num_tokens - decodes)
            assert 0 <= padding < CHUNKS[0]
            assert (len(prompts) < shape.prompt_rows) if prompts else (shape.prompt_rows == 0)


@pytest.mark.parametrize("longest", [64, 100, 512, 2048, 8192])
def test_prompts_alone_have_graphs_up_to_the_longest_chunk(longest):
    shapes = shapes_of(8, longest)
    for tokens in {1, 64, 65, longest // 2, longest, 1024, 1025, 2048}:
        shape = shapes.of(step(0, (0, tokens)))
        if tokens > min(longest, LONGEST_GRAPH):
            continue
        assert shape in shapes.all
        assert shape.decodes == 0
        assert shape.tokens == shape.prompt_tokens, "a row more costs the products a whole tile"
        assert tokens <= shape.tokens < tokens + 64


def test_attention_knows_the_longest_piece():
    assert CHUNKS[-1] == LONG_PIECE


def test_where_nothing_decodes_only_prompts_have_graphs():
    shapes = shapes_of(8, decodes=False)
    assert {shape.decodes for shape in shapes.all} == {0}
    assert shapes.of(step(0, (0, 700))) in shapes.all
    assert shapes.of(step(2)) is None
    assert shapes.of(step(2, (0, 5))) is None


def test_long_many_and_scored_prompts_have_none():
    shapes = shapes_of(8, 8192)
    assert shapes.of(step(2, (0, CHUNKS[-1] + 1))) is None
    assert shapes.of(step(0, (0, LONGEST_GRAPH + 1))) is None
    for decodes in (0, 2):
        assert shapes.of(step(decodes, *[(0, 5)] * (PROMPT_ROWS + 1))) is None
        assert shapes.of(step(decodes, (0, 5), scored=True)) is None


def packed(plan: StepPlan | None, shape: Shape) -> PackedStep:
    staging = StepStaging(1 << 14, torch.device("cpu"))
    staging.begin()
    found = pack(plan, shape, staging, NOBODY, PAGE_SIZE, has_head=True)
    staging.upload()
    return found


def test_decode_rows_come_first_and_prompts_behind_their_padding():
    plan = step(2, (4, 9), (0, 3), last=False)
    found = packed(plan, shape := Shape(8, PROMPT_ROWS + 1, CHUNKS[-1]))
    assert found.header.tolist() == [2, 2, plan.page_table.shape[1]]
    assert found.slots.tolist() == [20, 21] + [NOBODY] * 6
    assert found.contexts.tolist() == [11, 12] + [1] * 6 + [9, 3] + [1] * (PROMPT_ROWS - 1)
    assert found.prompts is not None
    ids, positions, stores = found.prompts.tokens.tolist()
    assert ids == [*range(502, 510), *[0] * (CHUNKS[-1] - 8)]
    assert positions[:8] == [4, 5, 6, 7, 8, 0, 1, 2]
    pages = plan.page_table
    assert stores[:5] == [pages[2, p // 4] * 4 + p % 4 for p in range(4, 9)]
    assert stores[5:8] == [pages[3, 0] * 4 + p for p in range(3)]
    assert {*positions[8:], *stores[8:]} == {0}, "position 0 of the scratch page"
    assert found.prompts.starts.tolist() == [0, 5] + [8] * (PROMPT_ROWS - 1) + [CHUNKS[-1]]
    assert found.prompts.ends.tolist() == [
        *range(8), 12, *[15] * (PROMPT_ROWS - 1), shape.tokens - 1,
    ]  # fmt: skip
    np.testing.assert_array_equal(found.page_table, pages)
    behind = found.prompts.behind
    assert behind is not None
    assert behind[:8].tolist() == [503, 504, 505, 506, -1 - 22, 508, 509, 77]
    assert found.sampled.tolist() == [0, 1, 8], "the second prompt is not done"
    assert found.sample_slots.tolist() == [20, 21, 22]


def test_a_group_of_a_window_has_a_table_that_begins_at_what_is_read():
    plan, shape = windowed(step(2, (14, 19), (0, 3))), Shape(8, PROMPT_ROWS + 1, CHUNKS[-1])
    staging = StepStaging(1 << 14, torch.device("cpu"))
    staging.begin()
    found = pack(plan, shape, staging, NOBODY, PAGE_SIZE, widths=[Width(width_of(shape))])
    staging.upload()
    (group,) = found.others
    assert group.header.tolist() == [2, 2, width_of(shape)]
    assert group.contexts.tolist() == [7, 8, *[1] * 6, 11, 3, *[1] * (PROMPT_ROWS - 1)]
    pages = plan.page_table + 1000
    assert group.page_table[0, :2].tolist() == pages[0, 1:3].tolist()
    assert group.page_table[2, :3].tolist() == pages[2, 2:5].tolist()
    assert not group.page_table[4:].any(), "the rest is the scratch page"
    assert group.stores[:5].tolist() == [pages[2, p // 4] * 4 + p % 4 for p in range(14, 19)]
    assert not group.stores[8:].any()
    assert found.contexts.tolist()[:2] == [11, 12], "group 0 has whole contexts"


def test_a_piece_that_fills_its_shape_leaves_no_token_to_padding():
    found = packed(step(0, (0, CHUNKS[-1])), Shape(1, PROMPT_ROWS + 1, CHUNKS[-1]))
    assert found.header.tolist()[:2] == [0, 1]
    assert found.prompts is not None
    assert found.prompts.starts.tolist() == [0] + [CHUNKS[-1]] * (PROMPT_ROWS + 1)
    assert found.sampled.tolist() == [1]


@pytest.mark.parametrize("shape", shapes_of(8).all)
def test_a_step_lies_where_the_graph_was_captured(shape):
    staging = StepStaging(1 << 14, torch.device("cpu"))
    prompts = [[(0, 7)], [(4, 8), (0, 30)]] if shape.prompt_rows else [[], []]
    plans = [None, *(step(min(shape.decodes, n), *p) for n, p in zip((1, 8), prompts, strict=True))]
    addresses = []
    for plan in plans:
        staging.begin()
        own = plan if plan is None else windowed(plan)
        widths = [Width(width_of(shape))]
        found = pack(own, shape, staging, NOBODY, PAGE_SIZE, widths=widths, has_head=True)
        staging.upload()
        (group,) = found.others
        fixed = [
            *(section for section in group if isinstance(section, torch.Tensor)),
            found.header,
            found.slots,
            found.contexts,
            *(found.prompts or ()),
            found.drafted_from,
            found.page_table,
        ]
        addresses.append([section.data_ptr() for section in fixed])
    assert addresses[1:] == addresses[:1] * 2


def test_sections_arrive_in_one_copy_at_addresses_their_sizes_decide():
    staging = StepStaging(1024, torch.device("cpu"))
    rng = np.random.default_rng(0)
    addresses = []
    for _ in range(5):
        arrays = [
            rng.integers(0, 1 << 31, shape).astype(np.int32) for shape in ((2,), (40,), (7, 9))
        ]
        staging.begin()
        sections = [staging.add(array) for array in arrays]
        staging.upload()
        for array, section in zip(arrays, sections, strict=True):
            np.testing.assert_array_equal(section.numpy(), array)
        addresses.append([section.data_ptr() for section in sections])
    assert all(line == addresses[0] for line in addresses)
    offsets = np.diff(addresses[0]) // 4
    assert (offsets % ALIGNMENT == 0).all()


def test_a_section_has_the_same_place_in_each_step_and_not_all_places_are_kept():
    staging = StepStaging(9000, torch.device("cpu"))
    first = None
    for length in [5, 5, *range(6, 9000)]:
        staging.begin()
        place = staging.add(np.full(length, length, np.int32))
        staging.upload()
        assert place.eq(length).sum() == length == len(place)
        assert first is None or (place is first) == (length == 5)
        first = first if first is not None else place
    assert len(staging._places) < 5000


def test_a_step_that_does_not_fit_says_so():
    staging = StepStaging(100, torch.device("cpu"))
    staging.begin()
    staging.add(np.zeros(90, np.int32))
    with pytest.raises(StagingError, match="100"):
        staging.add(np.zeros(90, np.int32))
