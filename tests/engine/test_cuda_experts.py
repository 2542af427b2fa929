"""Products with experts on a GPU, against float64.

`test_experts.py` runs our kernels in Triton's interpreter. PyTorch's are on a GPU alone.
"""

from __future__ import annotations

import experts_kit as kit
import pytest
import torch

from engine.model.experts.config import Gate
from engine.model.experts.routing import Chosen

pytestmark = pytest.mark.gpu

EXPERTS, CHOSEN = 12, 3
ERROR, ERROR_OF_FP8 = 8e-3, 3e-2
"""Relative, of bfloat16. With FP8 inputs, values between the products round the other way now and
then."""


@pytest.mark.parametrize("tokens", [1, 20, 250, 300, 1000])
@pytest.mark.parametrize("precision", kit.PRECISIONS)
def test_sums_of_any_number_of_rows(precision, tokens):
    check(precision, tokens, 512, 256)


@pytest.mark.parametrize("tokens", [1, 20, 300])
@pytest.mark.parametrize(
    ("precision", "hidden", "width"),
    [("mxfp4", 480, 288), ("int4", 288, 480), ("int4-zeros", 320, 192), ("int4-channel", 72, 296)],
)
def test_sizes_that_no_tile_divides(precision, hidden, width, tokens):
    check(precision, tokens, hidden, width)


def check(precision: str, tokens: int, hidden: int, width: int) -> None:
    from engine.cuda.experts.mixing import parts_of
    from engine.cuda.experts.summing import add_up

    torch.manual_seed(tokens)
    parts = kit.parts_of(EXPERTS, ("gate", "up"), width, hidden)
    gate_up = kit.stacked(precision, parts, torch.bfloat16, bias=True)
    parts = kit.parts_of(EXPERTS, ("down",), hidden, width)
    down = kit.stacked(precision, parts, torch.bfloat16, False)
    x = torch.randn(tokens, hidden).bfloat16()
    choice = kit.random_choice(tokens, EXPERTS, CHOSEN, "few")
    want = kit.exact(x, choice, gate_up, down, Gate(), torch.bfloat16)
    for known in (gate_up, down):
        known.weights.to("cuda")
    here = Chosen(choice.weights.cuda(), choice.experts.int().cuda())
    weights = gate_up.weights, down.weights
    runs = [add_up(parts_of(x.cuda(), here, *weights, Gate())) for _ in range(2)]
    assert torch.equal(*runs), "the same sum in every run"
    error = (runs[0].cpu().double() - want).norm() / want.norm()
    assert error < (ERROR_OF_FP8 if precision.startswith("fp8") else ERROR), float(error)
