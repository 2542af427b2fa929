"""Attention over latents on a GPU: the values that the benchmark compares. Whole engines are in
`test_cuda_families`."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("heads", [16, 20])
def test_kernels_give_what_float64_gives(heads):
    from bench.latents import check

    with torch.inference_mode():
        check(heads)
