"""What steps cost: a prompt token by its context, and a prompt's piece beside decode rows."""

from __future__ import annotations

import numpy as np
import pytest

from engine.loop.rates import _ChunkDelay, _ContextFit


def fitted(contexts: list[float], token_s: float, context_s: float, noise: float = 0.0):
    rng, fit = np.random.default_rng(3), _ContextFit()
    for context in contexts:
        fit.add(context, (token_s + context_s * context) * (1 + noise * rng.standard_normal()))
    return fit.cost


def test_nothing_is_known_before_the_first_step() -> None:
    assert _ContextFit().cost == (0.0, 0.0)


def test_contexts_that_differ_give_the_line() -> None:
    contexts = np.random.default_rng(1).integers(0, 20_000, 200).tolist()
    cost = fitted(contexts, 20e-6, 1e-9, noise=0.05)
    assert cost.token_s == pytest.approx(20e-6, rel=0.25)
    assert cost.context_s == pytest.approx(1e-9, rel=0.25)


def test_equal_contexts_give_the_mean_alone() -> None:
    """Noise must not become a slope."""
    cost = fitted([500.0 + i % 3 for i in range(100)], 20e-6, 1e-9, noise=0.3)
    assert cost.context_s < 1e-10 + 20e-6 / 2 / 500
    assert cost.token_s + 500 * cost.context_s == pytest.approx(20.5e-6, rel=0.4)


def test_the_line_never_falls() -> None:
    cost = fitted([float(i) for i in range(0, 10_000, 100)], 20e-6, -1e-9)
    assert cost.context_s == 0
    assert cost.token_s > 0


def test_the_delay_of_a_piece_is_what_the_step_takes_longer() -> None:
    delay = _ChunkDelay()
    for _ in range(30):
        delay.add(0, 6e-3)
        assert delay.seconds == 0 or delay.tokens
        delay.add(192, 9e-3)
    assert delay.seconds == pytest.approx(3e-3)
    assert delay.tokens == pytest.approx(192)


def test_no_delay_is_known_from_pieces_alone() -> None:
    delay = _ChunkDelay()
    delay.add(192, 9e-3)
    assert delay.seconds == 0
