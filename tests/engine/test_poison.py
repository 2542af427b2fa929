"""Free pages carry a pattern: a write of somebody who holds them no more is found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import build, check_baseline, finish, hand_off, held, prefill_pages, running, submit
from waiting import wait_until

from engine.engine import Engine
from engine.pages.blocks import BlockManager
from engine.pages.poison import PATTERN, PagePoison
from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import KvPool, PlainPool
from engine.types import SCRATCH_PAGE, Mode, SamplingParams, TokenRecord

PROMPT = list(range(7, 60))


@pytest.fixture(params=["auto", "fp8"])
def engine(tiny_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"prefix_cache": False, "poison_freed_pages": True}
    with running(tiny_path, num_pages=24, kv_cache_dtype=request.param, **options) as engine:
        yield engine


def pool_of(num_pages: int = 8) -> torch.Tensor:
    return torch.zeros((num_pages, 64), dtype=torch.uint8)


@pytest.mark.parametrize("kind", [PlainPool, Fp8Pool])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_pattern_is_a_finite_number_in_every_pool(
    kind: type[KvPool], dtype: torch.dtype
) -> None:
    pool = kind(
        num_pages=8, num_layers=2, num_kv_heads=2, head_dim=8, page_size=16, dtype=dtype,
        device=torch.device("cpu"),
    )  # fmt: skip
    poison = PagePoison(pool.data)
    assert not pool.data[SCRATCH_PAGE].any()
    assert (pool.data[1:] == PATTERN).all()
    for numbers in pool.gather(1, pool.places(torch.arange(1, 8))):
        assert torch.isfinite(numbers).all()
        assert kind is Fp8Pool or (numbers.abs() > 200).all()
    poison.allocated(np.arange(1, 8, dtype=np.int32))
    assert poison.damaged == 0


def test_a_page_is_filled_only_when_its_last_writer_has_settled() -> None:
    pages = pool_of()
    blocks = BlockManager(8, watch=PagePoison(pages))
    held = blocks.allocate(2)
    pages[held.tolist()] = 1
    blocks.mark_written(held[:1], step=4)
    blocks.settle(3)
    blocks.release(held)
    assert (pages[held[0]] == 1).all(), "step 4 may still write it"
    assert (pages[held[1]] == PATTERN).all()
    pages[held[0]] = 2  # step 4 does
    blocks.settle(4)
    assert (pages[held[0]] == PATTERN).all()
    blocks.allocate(7)
    assert blocks.damaged == 0


def test_one_byte_written_to_a_free_page_is_found_when_it_is_used_again() -> None:
    pages = pool_of()
    blocks = BlockManager(8, watch=PagePoison(pages))
    held = blocks.allocate(3)
    blocks.release(held)
    pages[held[1], 63] = 0
    blocks.allocate(7)
    assert blocks.damaged == 1


def test_a_late_write_is_found_while_the_engine_is_idle_and_counted_once(engine: Engine) -> None:
    finish(submit(engine, PROMPT))
    assert engine.load().damaged_pages == 0
    with held(engine):  # The end is told before pages are given back: they are by now.
        engine.pool.data[5] = 25
    wait_until(lambda: engine.load().damaged_pages == 1)
    time.sleep(0.6)  # two more idle turns
    finish(submit(engine, PROMPT, 64))
    assert engine.load().damaged_pages == 1
    check_baseline(engine)


def test_a_late_write_is_found_by_the_next_request_that_gets_the_page(engine: Engine) -> None:
    """The device is kept busy, so that no idle turn looks."""
    long = submit(engine, PROMPT, 200)
    wait_until(lambda: len(long.records[0]) > 2)
    free = engine.pool.num_pages - 1
    engine.pool.data[free] = 25
    finish(long, submit(engine, PROMPT, 64))
    wait_until(lambda: engine.load().damaged_pages == 1)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", pytest.param("fp8", marks=pytest.mark.matrix)])
def test_output_is_what_it_is_without_the_pattern(tiny_path: Path, kv_cache_dtype: str) -> None:
    """Preempted, packed and handed-off requests read nothing that they did not write."""
    seeded = SamplingParams(temperature=0.9, seed=3)
    prompts = [list(range(3 + i, 40 + 5 * i)) for i in range(6)]
    outputs = []
    for poisoned in (False, True):
        options = {"poison_freed_pages": poisoned, "prefix_cache": False}
        options["kv_cache_dtype"] = kv_cache_dtype
        small = build(tiny_path, num_pages=26, **options)
        other = build(tiny_path, num_pages=26, **options)
        with held(small):  # Together they outgrow the pool, one after another they would not.
            runs = [submit(small, prompt, 40, sampling=seeded) for prompt in prompts]
        finish(*runs)
        assert small.load().preemptions > 0
        runs += [hand_off(small, other, prompt, 12) for prompt in prompts]
        for engine in (small, other):
            check_baseline(engine)
            assert engine.load().damaged_pages == 0
            engine.stop()
        outputs.append([run.tokens for run in runs])
    assert outputs[0] == outputs[1]


def continuation(prefill: Engine, decode: Engine, first: int | None) -> list[int]:
    """Tokens of the second of two choices, handed off; the first one begins with `first`."""
    options = {"choices": 2, "sampling": SamplingParams(temperature=0.9, seed=3)}
    source = submit(prefill, PROMPT, 12, mode=Mode.PREFILL, **options)
    target = submit(decode, PROMPT, 12, mode=Mode.RECEIVE, **options)
    finish(source, target)
    pages = prefill.pool.data[torch.from_numpy(prefill_pages(prefill, source)[0].pages).long()]
    decode.pool.data[torch.from_numpy(target.reserved.pages).long()] = pages
    records = list(source.prefilled.records)
    if first is not None:
        records[0] = TokenRecord(first)
    decode.deliver(target.request.id, records)
    finish(target)
    prefill.release(source.request.id)
    return target.tokens[1]


def test_a_page_that_is_still_to_be_copied_is_not_free(tiny_path: Path) -> None:
    """Choices share their prompt's last page until the next step copies it for each. Where the
    first choice ends with the token that was delivered, its page was free before that step."""
    options = {"num_pages": 40, "prefix_cache": False, "poison_freed_pages": True}
    prefill, decode = build(tiny_path, **options), build(tiny_path, **options)
    assert len(PROMPT) % 16, "a partial page is what is copied"
    end_of_sequence = 0
    try:
        want = continuation(prefill, decode, first=None)
        assert continuation(prefill, decode, first=end_of_sequence) == want
        check_baseline(decode)
    finally:
        prefill.stop()
        decode.stop()
