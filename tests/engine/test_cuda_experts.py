"""Products with experts on a GPU, against float64.

`test_experts.py` runs our kernels in Triton's interpreter. PyTorch's are on a GPU alone.
"""

from __future__ import annotations

import experts_kit as kit
import pytest
import torch

from engine.model.experts.config import Gate, Held
from engine.model.experts.routing import Chosen

pytestmark = pytest.mark.gpu

EXPERTS, CHOSEN = 12, 3
ERROR, ERROR_OF_FP8 = 8e-3, 3e-2
"""Relative, of bfloat16. With FP8 inputs, values between the products round the other way now and
then."""
OSS = Gate(sharpness=1.702, shift=1.0, limit=7.0)
ERRORS = {torch.bfloat16: ERROR, torch.float16: 2e-3, torch.float32: 1e-5}
DTYPE = torch.bfloat16
FOUR_BITS = ("mxfp4", "int4", "int4-zeros", "int4-channel")


@pytest.mark.parametrize("tokens", [1, 20, 250, 300, 1000])
@pytest.mark.parametrize("precision", kit.PRECISIONS)
def test_sums_of_any_number_of_rows(precision, tokens):
    check(precision, tokens, 512, 256)


@pytest.mark.parametrize("tokens", [1, 3, 20, 300])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("precision", kit.PRECISIONS)
def test_ranks_with_whole_experts_add_up(precision, ranks, tokens):
    """What no rank has computed is no number, and is not added."""
    check(precision, tokens, 512, 256, ranks=ranks)


@pytest.mark.parametrize("tokens", [1, 20, 300])
@pytest.mark.parametrize(
    ("precision", "hidden", "width"),
    [("mxfp4", 480, 288), ("int4", 288, 480), ("int4-zeros", 320, 192), ("int4-channel", 72, 296)],
)
def test_sizes_that_no_tile_divides(precision, hidden, width, tokens):
    check(precision, tokens, hidden, width)


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("gate", [Gate(), OSS])
@pytest.mark.parametrize(
    ("precision", "hidden", "width"),
    [
        ("mxfp4", 2880, 736), ("mxfp4", 1056, 288), ("int4", 1440, 480), ("int4-zeros", 2880, 704),
        ("int4-channel", 992, 1056),
    ],
)  # fmt: skip
def test_one_row_of_four_bits(precision, hidden, width, gate, dtype):
    check(precision, 1, hidden, width, gate=gate, dtype=dtype, experts=5)


CUTS = [
    (2, 512, 1), (4, 512, 1), (8, 512, 1), (16, 512, 1), (8, 512, 2), (16, 512, 2), (32, 512, 4),
    (4, 1024, 1), (4, 1024, 2), (8, 1024, 2), (2, 2048, 4), (4, 2048, 4), (8, 2048, 4),
]  # fmt: skip
"""Outputs, bytes and warps of one row, which has a kernel of its own without stages."""


@pytest.mark.parametrize("precision", FOUR_BITS)
def test_every_cut_of_one_row_of_four_bits(precision):
    """An expert's product in float64 is that of each cut, and so is its gate's."""
    from engine.cuda.experts.cutting import Tiles
    from engine.cuda.experts.products import product
    from engine.cuda.experts.routing import activate, sort

    known = kit.stacked(precision, kit.parts_of(4, ("gate", "up"), 200, 2880), DTYPE, bias=True)
    order = sort(torch.tensor([[3, 0, 2]], dtype=torch.int32, device="cuda"), 4)
    x = (torch.randn(3, 2880) * torch.tensor([[1.0], [300.0], [1e-2]])).to(DTYPE)
    want = torch.stack([known.exact[e] @ row.double() for e, row in zip((3, 0, 2), x, strict=True)])
    want += known.weights.bias[[3, 0, 2]].double()
    known.weights.to("cuda")
    x = x.cuda()
    same = x[:1].expand(3, -1).contiguous()
    for outputs, inputs, *others in CUTS:
        tiles = Tiles(outputs, inputs, 1, *others)
        got = product(x, known.weights, order, tiles=tiles)
        error = (got.cpu().double() - want).norm(dim=1) / want.norm(dim=1)
        assert (error < ERROR).all(), (tiles, error)
        both = product(x[:1], known.weights, order, gate=OSS, by_token=True, tiles=tiles)
        apart = activate(product(same, known.weights, order, tiles=tiles), OSS)
        torch.testing.assert_close(both, apart, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_not_lost_in_integers(wrong):
    from engine.cuda.experts.products import product
    from engine.cuda.experts.routing import sort

    known = kit.stacked("mxfp4", kit.parts_of(3, ("down",), 64, 2880), DTYPE, bias=False)
    known.weights.to("cuda")
    x = torch.randn(2, 2880, device="cuda", dtype=DTYPE)
    x[1, 2877] = wrong
    order = sort(torch.tensor([[2, 0]], dtype=torch.int32, device="cuda"), 3)
    got = product(x, known.weights, order)
    assert got[0].isfinite().all()
    assert not got[1].isfinite().any()


def check(
    precision: str,
    tokens: int,
    hidden: int,
    width: int,
    *,
    gate: Gate = Gate(),  # noqa: B008 (frozen)
    dtype: torch.dtype = torch.bfloat16,
    experts: int = EXPERTS,
    ranks: int = 1,
) -> None:
    from engine.cuda.experts.mixing import parts_of
    from engine.cuda.experts.summing import add_up
    from engine.model.experts.routing import held

    torch.manual_seed(tokens)
    parts = kit.parts_of(experts, ("gate", "up"), width, hidden)
    gate_up = kit.stacked(precision, parts, dtype, bias=True)
    parts = kit.parts_of(experts, ("down",), hidden, width)
    down = kit.stacked(precision, parts, dtype, False)
    x = torch.randn(tokens, hidden).to(dtype)
    choice = kit.random_choice(tokens, experts, CHOSEN, "few")
    want = kit.exact(x, choice, gate_up, down, gate, dtype)
    for known in (gate_up, down):
        known.weights.to("cuda")
    here = Chosen(choice.weights.cuda(), choice.experts.int().cuda())
    places = [Held(rank, ranks) for rank in range(ranks)]

    def run() -> torch.Tensor:
        total = torch.zeros(tokens, hidden, dtype=dtype, device="cuda")
        for which in places:
            own = [kit.of_rank(known.weights, which) for known in (gate_up, down)]
            chosen = held(here, len(own[0].parts), which)
            with kit.no_numbers():
                total += add_up(parts_of(x.cuda(), chosen, *own, gate, ranks=ranks))
        return total

    runs = [run() for _ in range(2)]
    assert torch.equal(*runs), "the same sum in every run"
    error = (runs[0].cpu().double() - want).norm() / want.norm()
    limit = ERROR_OF_FP8 if precision.startswith("fp8") else ERRORS[dtype]
    assert error < limit, float(error)
