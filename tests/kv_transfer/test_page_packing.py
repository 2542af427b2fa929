"""Pages gathered into a buffer and scattered out of it, by torch and by our kernel."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.packing import gather, scatter

WAYS = [
    pytest.param("cpu", 64, id="torch on a CPU"),
    pytest.param("cuda", 0, id="torch on a GPU", marks=pytest.mark.gpu),
    *(
        pytest.param("cuda", blocks, id=f"{blocks} blocks", marks=pytest.mark.gpu)
        for blocks in (1, 7, 64)
    ),
]


@pytest.mark.parametrize("words", [1, 2048, 5000])
@pytest.mark.parametrize(("device", "blocks"), WAYS)
def test_pages_come_out_as_they_went_in(device, blocks, words):
    pages = torch.randint(-(2**62), 2**62, (40, words), device=device)
    before = pages.clone()
    ids = torch.randperm(40, device=device)[:23]
    staged = torch.zeros(23, words, dtype=torch.int64, device=device)

    gather(pages, ids, staged, blocks)
    assert torch.equal(staged, before[ids])

    targets = torch.randperm(40, device=device)[:23]
    scatter(pages, targets, staged, blocks)
    expected = before.clone()
    expected[targets] = before[ids]
    assert torch.equal(pages, expected), "another page was touched, or one was not"
