"""Buckets and the packed copy, on any device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cuda.buckets import bucket_of, bucket_sizes
from engine.cuda.staging import ALIGNMENT, Staging, StagingError


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 9, 16, 100, 256, 300])
def test_every_batch_has_a_bucket_that_wastes_little(most):
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, most + 1):
        bucket = bucket_of(rows, sizes)
        assert rows <= bucket < rows + 8
        assert all(size < rows for size in sizes if size < bucket)


def test_small_batches_have_buckets_of_their_own():
    sizes = bucket_sizes(256)
    assert [bucket_of(rows, sizes) for rows in (1, 2, 3, 5, 8, 9, 64, 256)] == [
        1, 2, 4, 8, 8, 16, 64, 256,
    ]  # fmt: skip


def test_sections_arrive_in_one_copy_at_addresses_their_sizes_decide():
    staging = Staging(1024, torch.device("cpu"))
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


def test_a_step_that_does_not_fit_says_so():
    staging = Staging(100, torch.device("cpu"))
    staging.begin()
    staging.add(np.zeros(90, np.int32))
    with pytest.raises(StagingError, match="100"):
        staging.add(np.zeros(90, np.int32))
