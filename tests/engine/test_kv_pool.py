"""The pool's layout: what other processes and kernels rely on."""

from __future__ import annotations

import pytest
import torch

from engine.pages.kv_pool import KvPool

PAGES, HEADS, LAYERS, SIZE, DIM = 7, 3, 4, 8, 16


@pytest.fixture
def pool() -> KvPool:
    return KvPool(
        num_pages=PAGES, num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, page_size=SIZE,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def numbered(pool: KvPool) -> KvPool:
    pool.tensor.copy_(torch.arange(pool.tensor.numel()).view(pool.tensor.shape))
    return pool


def test_it_starts_zeroed(pool):
    assert not pool.tensor.any()


def test_a_page_is_one_run_of_bytes(pool):
    assert pool.tensor.is_contiguous()
    assert pool.page_bytes == HEADS * LAYERS * 2 * SIZE * DIM * 4
    assert pool.tensor[3].is_contiguous()
    assert pool.tensor[3].data_ptr() == pool.tensor.data_ptr() + 3 * pool.page_bytes


def test_a_range_of_heads_of_a_page_is_one_run_of_bytes(pool):
    assert pool.tensor[3, 1:].is_contiguous()


def test_layer_views_write_through(pool):
    keys, values = pool.layer(2)
    assert keys.shape == values.shape == (PAGES, HEADS, SIZE, DIM)
    keys[5, 1, 3] = 1.0
    values[5, 1, 3] = 2.0
    assert pool.tensor[5, 1, 2, 0, 3].eq(1.0).all()
    assert pool.tensor[5, 1, 2, 1, 3].eq(2.0).all()
    assert pool.tensor.sum() == 3 * DIM
    assert torch.equal(pool.layer_kv(2)[:, :, 1], values)


def test_run_ids_name_the_runs_of_a_layer(pool):
    pages = torch.tensor([[4, 0], [6, 2]])
    ids = numbered(pool).run_ids(pages)
    assert ids.shape == (2, HEADS, 2)
    for layer in range(LAYERS):
        for offset, part in enumerate(pool.layer(layer)):
            want = part[pages].transpose(1, 2).reshape(2, HEADS, 2, SIZE * DIM)
            assert torch.equal(pool.runs[ids + 2 * layer + offset], want)


def test_run_ids_pass_32_bits(pool):
    page = 2**33
    assert pool.run_ids(torch.tensor([page]))[0, 0] == page * HEADS * LAYERS * 2


def test_copying_pages_copies_every_layer_and_nothing_else(pool):
    before = numbered(pool).tensor.clone()
    pool.copy_pages(torch.tensor([1, 1, 5]), torch.tensor([2, 6, 3]))
    for page, source in enumerate((0, 1, 1, 5, 4, 5, 1)):
        assert torch.equal(pool.tensor[page], before[source])
