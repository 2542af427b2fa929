"""Drawn tokens follow the distribution asked for, and its noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_reference import distribution

from engine.sampling import Sampler, ops
from engine.types import SamplingParams, StopRules

NONE = np.zeros(0, np.int32)
FOREVER = StopRules(10**6)
DRAWS = 10_000


def draw_many(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    sampler = Sampler(1, len(logits), "cpu", [])
    sampler.assign(0, params, FOREVER, 0, NONE, NONE)
    plan = sampler.plan(np.zeros(DRAWS, np.int32), np.arange(DRAWS))
    return sampler.sample(logits.repeat(DRAWS, 1), plan).tokens.numpy()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, seed=2**64 - 1),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=7),
        SamplingParams(top_k=1),
        SamplingParams(top_p=0.7),
        SamplingParams(top_p=0.01),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=20, top_p=0.8),
        SamplingParams(temperature=0.7, top_k=12, top_p=0.9, min_p=0.02),
        SamplingParams(temperature=1.5, top_p=0.95, min_p=0.05),
    ],
    ids=str,
)
def test_frequencies(params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(40, generator=generator) * 2
    exact, _ = distribution(logits.double().numpy(), params)
    seen = np.bincount(draw_many(logits, params), minlength=40)
    assert not seen[exact == 0].any()
    # Rare tokens share a bin, for the chi-square distribution to apply.
    common = exact * DRAWS >= 5
    hoped = np.append(exact[common], exact[~common].sum()) * DRAWS
    counted = np.append(seen[common], seen[~common].sum())
    hoped, counted = hoped[hoped > 0], counted[hoped > 0]
    freedom = max(len(hoped) - 1, 1)
    assert ((counted - hoped) ** 2 / hoped).sum() < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 1000, 49_152])
def test_inverse_cdf_against_one_cumulative_sum(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    scaled = torch.randn(32, vocab_size, generator=generator) * 3
    scaled -= scaled.amax(-1, keepdim=True)
    numbers = torch.rand(32, dtype=torch.float64, generator=generator)
    numbers[0], numbers[1] = 2.0**-53, 1 - 2.0**-53
    drawn = ops.draw(scaled, None, numbers)
    ends = scaled.exp().double().cumsum(-1)
    exact = torch.searchsorted(ends, numbers[:, None] * ends[:, -1:], right=True).squeeze(-1)
    near = drawn.margin < 1e-6
    assert ((drawn.tokens == exact) | near).all()
    assert near.sum() <= 4


def test_a_token_without_weight_is_never_drawn() -> None:
    scaled = torch.full((4, 700), -torch.inf)
    scaled[0, 0] = scaled[1, 699] = scaled[2, 255] = scaled[3, 256] = 0
    for number in (2.0**-53, 0.5, 1 - 2.0**-53):
        drawn = ops.draw(scaled, None, torch.full((4,), number, dtype=torch.float64))
        assert drawn.tokens.tolist() == [0, 699, 255, 256]


def test_margin_is_the_distance_to_the_nearer_edge() -> None:
    scaled = torch.tensor([[0.5, 0.25, 0.25]]).log()
    for number, token, margin in ((0.1, 0, 0.1), (0.45, 0, 0.05), (0.6, 1, 0.1), (0.9, 2, 0.1)):
        drawn = ops.draw(scaled, None, torch.tensor([number], dtype=torch.float64))
        assert drawn.tokens.item() == token
        assert drawn.margin.item() == pytest.approx(margin, abs=1e-6)


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e6])
def test_extreme_temperatures(temperature: float) -> None:
    logits = torch.tensor([1.0, 3.0, -2.0, 2.9])
    tokens = draw_many(logits, SamplingParams(temperature=temperature))
    if temperature < 1:
        assert (tokens == 1).all()
    else:
        assert np.bincount(tokens).min() > DRAWS / 4.2


@pytest.mark.parametrize("vocab_size", [600, 3000])
def test_wide_rows_are_cut_as_if_sorted(vocab_size: int) -> None:
    """The shortcut over a row's few best tokens is no different from ranking all of them."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.tensor([0.01, 0.5, 2.0, 8.0]).repeat(16)[:, None]
    scaled = torch.randn(64, vocab_size, generator=generator) * spread
    scaled -= scaled.amax(-1, keepdim=True)
    floor = torch.where(torch.arange(64) % 3 == 0, -3.0, -torch.inf)
    top_p = torch.rand(64, dtype=torch.float64, generator=generator)
    top_p[::5] = torch.inf
    top_k = torch.where(torch.arange(64) % 4 == 0, 550, vocab_size)
    sorted_floor = ops.nucleus_floor(scaled.topk(vocab_size).values, floor, top_k, top_p)
    assert torch.equal(ops.wide_nucleus_floor(scaled, floor, top_k, top_p), sorted_floor)
