"""Products with experts on a GPU, against float64.

`test_experts.py` runs our kernels in Triton's interpreter. PyTorch's are on a GPU alone.
"""

from __future__ import annotations

from collections.abc import Callable

import experts_kit as kit
import pytest
import torch
from torch import Tensor

from engine.model.experts.config import Gate, Routing
from engine.model.experts.routing import Chosen
from engine.model.linear import Build, RmsNorm
from engine.model.precision.choice import Precision
from engine.model.shard import Shard
from engine.ranks.collective import Alone

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


@pytest.mark.parametrize(("hidden", "width"), [(512, 256), (2048, 768)])
@pytest.mark.parametrize("precision", ["float", "fp8", "fp8-blocks", "mxfp4"])
def test_one_row_through_many_layers_in_a_graph_equals_kernels_one_by_one(
    precision, hidden, width, monkeypatch
):
    """A product that starts early never takes the experts of a layer before, which lay at the same
    address."""
    from engine.cuda.experts.mixing import parts_of
    from engine.cuda.experts.routing import route
    from engine.cuda.joining import Join, joined
    from engine.cuda.products.single_row import linear

    torch.manual_seed(hidden)
    parts = kit.parts_of(EXPERTS, ("gate", "up"), width, hidden)
    gate_up = kit.stacked(precision, parts, torch.bfloat16, False).weights.to("cuda")
    parts = kit.parts_of(EXPERTS, ("down",), hidden, width)
    down = kit.stacked(precision, parts, torch.bfloat16, False).weights.to("cuda")
    cuda, how = torch.device("cuda"), Routing(EXPERTS, CHOSEN, normalised=True)
    precisely = Precision(cuda, torch.bfloat16)
    norm = RmsNorm(hidden, 1e-6, Build(torch.bfloat16, cuda, precisely, Shard(), Alone()))
    norm.weight.fill_(1)
    routers = torch.randn(100, EXPERTS, hidden, device=cuda, dtype=torch.bfloat16)
    start = torch.randn(1, hidden, device=cuda, dtype=torch.bfloat16)

    def chain() -> Tensor:
        residual, x, chosen = start.clone(), start, []
        for router in routers:
            choice = route(linear(x, router), how, None)
            chosen.append(choice.experts.flatten())
            x = joined(
                residual, parts_of(x, choice, gate_up, down, Gate()), Join(None, norm, None, 1.0)
            )
        return torch.cat((residual.flatten(), x.flatten(), *chosen))

    want = one_by_one(chain, monkeypatch)
    assert want.isfinite().all()
    assert len(want[2 * hidden :].view(-1, CHOSEN).unique(dim=0)) > 1, "layers choose differently"
    assert torch.equal(chain(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def one_by_one(chain: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The chain's result when no kernel starts before the one before has ended."""
    from engine.cuda.experts import one_row, routing, summing
    from engine.cuda.products import rounding, single_row

    with monkeypatch.context() as patched:
        for module in (one_row, routing, summing, rounding, single_row):
            patched.setattr(module, "early", lambda: False)
        return chain()


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
