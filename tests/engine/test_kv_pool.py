"""The pools' layout: what other processes and kernels rely on. And what they store."""

from __future__ import annotations

import pytest
import torch

from engine.pool import page_pool
from engine.pool.fp8_pool import Fp8Pool
from engine.pool.fp8_rounding import Rounded, round_rows, widen
from engine.pool.kinds import PoolError, pool_type
from engine.pool.kv_pool import KvPool, PlainPool

PAGES, HEADS, LAYERS, SIZE, DIM = 7, 3, 4, 16, 8
KINDS = [(PlainPool, torch.float32), (PlainPool, torch.bfloat16), (Fp8Pool, torch.float32)]
KINDS += [(Fp8Pool, torch.bfloat16), (Fp8Pool, torch.float16)]


def pool_of(kind: type[KvPool], dtype: torch.dtype, **options: int) -> KvPool:
    shape = {
        "num_pages": PAGES, "num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM,
        "page_size": SIZE, **options,
    }  # fmt: skip
    return kind(**shape, dtype=dtype, device=torch.device("cpu"))


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0].__name__}-{kind[1]}")
def pool(request) -> KvPool:
    return pool_of(*request.param)


def numbered(pool: KvPool) -> KvPool:
    pool.data.copy_(torch.arange(pool.data.numel()).view(pool.data.shape) % 251)
    return pool


def stored(pool: KvPool, x: torch.Tensor) -> torch.Tensor:
    """What a pool makes of K or V."""
    return widen(round_rows(x), x.dtype) if isinstance(pool, Fp8Pool) else x


def test_it_starts_zeroed(pool):
    assert not pool.data.any()
    for part in pool.gather(1, pool.places(torch.arange(PAGES))):
        assert part.shape == (HEADS, PAGES * SIZE, DIM)
        assert not part.any()


def test_a_page_is_one_run_of_bytes_and_so_is_a_range_of_its_heads(pool):
    assert pool.data.is_contiguous()
    assert pool.data.shape == (PAGES, pool.page_bytes)
    assert pool.page_bytes == HEADS * pool.head_bytes
    pages, offsets = torch.full((SIZE,), 3), torch.arange(SIZE)
    for layer in range(LAYERS):
        k, v = torch.randn(2, SIZE, HEADS, DIM).to(pool.dtype) + 9
        k[:, 1], v[:, 1] = 0, 0
        pool.write(layer, pages, offsets, k, v)
    written = pool.data.view(PAGES, HEADS, -1).ne(0).any(-1)
    assert written.nonzero().tolist() == [[3, 0], [3, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_pages_hold_numbers_in_the_order_of_the_layout(dtype):
    pool = pool_of(PlainPool, dtype)
    assert pool.page_bytes == HEADS * LAYERS * 2 * SIZE * DIM * dtype.itemsize
    keys, values = pool.layer(2)
    assert keys.shape == values.shape == (PAGES, HEADS, SIZE, DIM)
    keys[5, 1, 3], values[5, 1, 3] = 1.0, 2.0
    view = pool.data.view(dtype).view(PAGES, HEADS, LAYERS, 2, SIZE, DIM)
    assert view[5, 1, 2, 0, 3].eq(1.0).all()
    assert view[5, 1, 2, 1, 3].eq(2.0).all()
    assert view.sum() == 3 * DIM


def test_fp8_pages_hold_all_exponents_of_a_head_behind_its_values():
    pool = pool_of(Fp8Pool, torch.bfloat16)
    k, v = torch.full((2, 1, HEADS, DIM), 3.0, dtype=torch.bfloat16)
    pool.write(2, torch.tensor([5]), torch.tensor([3]), k, v * 8)
    head = pool.data[5].view(HEADS, -1)[1]
    values = head[: LAYERS * 2 * SIZE * DIM].view(torch.float8_e4m3fn).view(LAYERS, 2, -1)
    assert values[2, 0].view(SIZE, DIM)[3].float().eq(384).all()
    assert values[2, 1].view(DIM, SIZE)[:, 3].float().eq(384).all(), "V has its tokens in a row"
    assert values.float().sum() == 2 * DIM * 384
    exponents = head[LAYERS * 2 * SIZE * DIM :].view(torch.int8).view(LAYERS, 2, SIZE)
    assert exponents[2, :, 3].tolist() == [-7, -4]
    assert exponents.count_nonzero() == 2


def test_a_head_of_8b_in_fp8_takes_what_the_design_says():
    shape = {"num_pages": 1, "num_layers": 32, "num_kv_heads": 8, "head_dim": 128}
    pool = pool_of(Fp8Pool, torch.bfloat16, **shape, page_size=16)
    assert pool.head_bytes == 132_096
    assert pool.page_stride % 16 == pool.head_stride % 16 == pool.layer_stride % 16 == 0


def test_a_read_gives_what_a_write_returned(pool):
    generator = torch.Generator().manual_seed(3)
    places = [(page, offset) for page in (1, 4, 6) for offset in range(SIZE)]
    order = torch.randperm(len(places), generator=generator).tolist()
    pages, offsets = torch.tensor([places[i] for i in order]).T
    k, v = torch.randn(2, len(places), HEADS, DIM, generator=generator).to(pool.dtype) * 5
    written = pool.write(2, pages, offsets, k, v)
    read = pool.gather(2, pool.places(torch.tensor([[6, 1], [1, 4]])))
    for got, back, x in zip(read, written, (k, v), strict=True):
        assert got.dtype == back.dtype == pool.dtype
        assert torch.equal(back, stored(pool, x))
        assert got.shape == (2, HEADS, 2 * SIZE, DIM)
        for row, col, page in ((0, 0, 6), (0, 1, 1), (1, 0, 1), (1, 1, 4)):
            want = back[pages == page][offsets[pages == page].argsort()].transpose(0, 1)
            assert torch.equal(got[row, :, col * SIZE : (col + 1) * SIZE], want)


def test_places_pass_32_bits():
    page = torch.tensor([2**33])
    assert pool_of(PlainPool, torch.float32).places(page)[0, 0] == 2**33 * HEADS * LAYERS * 2
    assert pool_of(Fp8Pool, torch.float32).places(page)[0] == 2**33


def test_copying_pages_copies_every_layer_and_nothing_else(pool):
    before = numbered(pool).data.clone()
    pool.copy_pages(torch.tensor([1, 1, 5]), torch.tensor([2, 6, 3]))
    for page, source in enumerate((0, 1, 1, 5, 4, 5, 1)):
        assert torch.equal(pool.data[page], before[source])


@pytest.mark.parametrize("at_once", [1, 100, page_pool.COPIED_BYTES])
def test_pages_may_be_copied_in_a_round(pool, at_once, monkeypatch):
    monkeypatch.setattr(page_pool, "COPIED_BYTES", at_once)
    before = numbered(pool).data.clone()
    pool.copy_pages(torch.tensor([2, 3, 1, 4]), torch.tensor([1, 2, 3, 4]))
    assert torch.equal(pool.data[1:5], before[[2, 3, 1, 4]])


def test_an_fp8_pool_refuses_pages_that_it_cannot_align():
    assert pool_type("fp8", 32) is Fp8Pool
    assert pool_type("auto", 4) is PlainPool
    with pytest.raises(PoolError, match="multiple of 16 tokens, and page_size_tokens is 24"):
        pool_type("fp8", 24)
    with pytest.raises(PoolError, match="'int8' is not one of auto, fp8"):
        pool_type("int8", 16)


# -- rounding -----------------------------------------------------------------------------------


def nearest(x: float, exponent: int) -> float:
    """The e4m3 number nearest to x / 2**exponent, ties to even, by search in float64."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    apart = (numbers - abs(x) / 2.0**exponent).abs()
    ties = (apart == apart.min()).nonzero().flatten().tolist()
    best = next((i for i in ties if i % 2 == 0), ties[0])
    return float(torch.copysign(numbers[best], torch.tensor(x)).double() * 2.0**exponent)


def test_rounding_takes_the_least_exponent_and_the_nearest_number():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 16, generator=generator) * 2.0 ** torch.randint(-30, 30, (400, 1))
    x[0] = torch.tensor([448, 447.9, 1.0625, 1.1875, -1.0625, 2**-10, 2**-9.0, 0.0] * 2)
    rounded = round_rows(x)
    got = widen(rounded, torch.float32)
    amax = x.abs().amax(-1).double()
    exponents = rounded.exponents.double()
    assert (amax / 2**exponents <= 448).all()
    assert (amax / 2 ** (exponents - 1) > 448).all()
    for row, exponent in enumerate(rounded.exponents.tolist()):
        assert got[row].tolist() == [nearest(number, exponent) for number in x[row].tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_at_the_ends_of_a_dtype(dtype):
    info = torch.finfo(dtype)
    rows = [[0.0, -0.0], [info.max, 1.0], [-info.max, info.tiny], [info.tiny, -info.tiny]]
    rows += [[info.smallest_normal / 2, 0.0]]
    x = torch.tensor(rows, dtype=dtype)
    rounded = round_rows(x)
    assert rounded.exponents[0] == 0
    got = widen(rounded, dtype)
    assert got.isfinite().all()
    assert not got[0].any()
    assert got[1, 0] >= 0.87 * info.max
    again = round_rows(got)
    assert torch.equal(widen(again, dtype), got), "a rounded row stays as it is"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_exact(dtype):
    """Every e4m3 number with every exponent that a row of the dtype can have."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    least, most = (-15, 7) if dtype is torch.float16 else (-117, 119)
    exponents = torch.arange(least, most + 1, dtype=torch.int8)
    values = numbers.view(torch.uint8).expand(len(exponents), -1).view(torch.float8_e4m3fn)
    got = widen(Rounded(values, exponents), dtype)
    want = numbers.double() * 2.0 ** exponents.double()[:, None]
    assert torch.equal(got.double(), want)


def test_a_row_that_holds_no_number_reads_as_none_and_has_no_nan_stored():
    inf, nan = float("inf"), float("nan")
    rounded = round_rows(torch.tensor([[inf, 1.0], [2.0, nan], [3.0, -inf], [4.0, 1.0]]))
    assert rounded.values[:3].float().eq(0).all()
    got = widen(rounded, torch.float32)
    assert got[:3].isnan().all()
    assert got[3].tolist() == [4.0, 1.0]
