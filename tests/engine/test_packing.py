"""Packed weights: the same products, for any number of rows, in a bounded number of shapes."""

from __future__ import annotations

import pytest
import torch
from tiny_models import write_tiny_model
from torch import nn

from engine.model.families import read_config
from engine.model.loading import load_model
from engine.model.precision.packing import pack, padded, product

CPU = torch.device("cpu")


def weight_of(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    generator = torch.Generator().manual_seed(outputs)
    return nn.Parameter(
        torch.randn(outputs, inputs, generator=generator).to(dtype), requires_grad=False
    )


@pytest.mark.parametrize("rows", [0, 1, 3, 9, 31, 33, 200])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_products_equal_plain_ones(rows: int, with_bias: bool) -> None:
    weight = weight_of(56, 40)
    bias = torch.randn(56) if with_bias else None
    packed = pack(weight)
    assert packed.is_mkldnn
    assert packed.shape == weight.shape
    x = torch.randn(rows, 40)
    torch.testing.assert_close(
        product(x, packed, bias), product(x, weight, bias), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_precisions_stay_as_they_are(dtype: torch.dtype) -> None:
    weight = weight_of(8, 8, dtype)
    assert pack(weight) is weight


def test_rows_are_padded_to_four_numbers_an_octave() -> None:
    assert [padded(rows) for rows in (1, 8, 9, 16, 17, 33, 64, 65, 257)] == [
        *(1, 8, 10, 16, 20, 40, 64, 80, 320)
    ]
    for rows in range(1, 4097):
        assert rows <= padded(rows) < 1.25 * rows + 1
    assert len({padded(rows) for rows in range(1, 4097)}) == 8 + 4 * 9


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_model_says_the_same(tmp_path, tied: bool) -> None:
    path = write_tiny_model(tmp_path, tokenizer=False, tie_word_embeddings=tied)
    assert read_config(path).tie_embeddings is tied
    model = load_model(str(path), dtype=torch.float32, device=CPU).model
    hidden = torch.randn(5, model.config.hidden_size)
    plain = model.logits(hidden)
    size = sum(p.numel() for p in model.parameters())
    model.finish()
    model.finish()
    kept_twice = model.embedding.numel() if tied else 0
    assert sum(p.numel() for p in model.parameters()) == size + kept_twice
    torch.testing.assert_close(model.logits(hidden), plain, rtol=0, atol=1e-4)
