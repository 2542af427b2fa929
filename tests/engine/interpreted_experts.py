"""Runs the kernels of experts in Triton's interpreter, against float64.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import cast
from unittest import mock

import experts_kit as kit
import interpreted_ptx
import torch
import triton
import triton.language as tl
from interpreted_kernels import convert_as_a_gpu_does
from triton.runtime import interpreter

from engine.cuda import feed_forward
from engine.cuda.experts import mixing, one_row
from engine.cuda.experts import routing as kernels
from engine.cuda.experts.cutting import Tiles
from engine.cuda.experts.four_bits import numbers_of
from engine.cuda.experts.mixing import parts_of
from engine.cuda.experts.products import product
from engine.cuda.experts.summing import Parts, add_up
from engine.cuda.joining import Join, joined
from engine.cuda.products import CudaProducts, single_row, unrounded_row
from engine.cuda.products import one_row as products_of_row
from engine.cuda.products.rounding import rounded
from engine.model.experts import routing
from engine.model.experts.config import Gate, Held, Routing, Scores
from engine.model.experts.routing import Chosen
from engine.model.experts.stacked import Stacked
from engine.model.linear import Build, RmsNorm
from engine.model.precision import mxfp4
from engine.model.precision.choice import Precision
from engine.model.precision.rounding import Rounding
from engine.model.shard import Shard
from engine.step.collective import Alone

OSS = Gate(sharpness=1.702, shift=1.0, limit=1.0)
ROUTINGS = {
    "softmax": Routing(12, 3),
    "normalised": Routing(12, 3, normalised=True),
    "sigmoid": Routing(12, 4, Scores.SIGMOID, normalised=True, factor=2.5, bias=True),
    "groups": Routing(
        12, 4, Scores.SIGMOID, factor=2.5, groups=4, open_groups=2, best_of_group=2, bias=True
    ),
    "of chosen": Routing(12, 4, Scores.SOFTMAX_OF_CHOSEN),
    "one": Routing(5, 1),
}


def check_route(how: Routing, ranks: int = 3) -> None:
    """Ties, too, and among the experts of each of several ranks."""
    logits = (torch.randn(40, how.experts) * 2).round() / 2
    logits[0] = 0
    bias = torch.randn(how.experts).round() if how.bias else None
    got, want = kernels.route(logits, how, bias), routing.route(logits.double(), how, bias)
    assert torch.equal(got.experts.long(), want.experts), how
    torch.testing.assert_close(got.weights, want.weights.float(), rtol=1e-5, atol=1e-6)
    for which in (Held(rank, ranks) for rank in range(ranks)):
        own = routing.held(got, len(which.of(how.experts)), which)
        parts = kernels.route(logits, how, bias, which)
        assert all(torch.equal(*pair) for pair in zip(own, parts, strict=True)), (how, which)


def check_what_is_no_number() -> None:
    logits = torch.randn(3, 5)
    logits[1] = float("nan")
    logits[2, 4] = float("inf")
    got = kernels.route(logits, Routing(5, 2), None)
    assert got.weights[0].isfinite().all()
    assert got.weights[1:].isnan().any(1).all()
    assert ((got.experts >= 0) & (got.experts < 5)).all()
    assert (got.experts[:, 0] != got.experts[:, 1]).all()
    logits = torch.full((2, 5), float("-inf"))
    logits[0, 3] = logits[1, 0] = 1.0
    for how in (Routing(5, 3), Routing(5, 3, Scores.SOFTMAX_OF_CHOSEN)):
        got, want = kernels.route(logits, how, None), routing.route(logits, how)
        assert torch.equal(got.experts.long(), want.experts), how
        assert torch.equal(got.weights, want.weights), how


def check_sort(tokens: int, experts: int, chosen: int, kind: str) -> None:
    choice = kit.random_choice(tokens, experts, chosen, kind).experts.int()
    total = torch.full((1,), 1 << 40)
    order = kernels.sort(choice, experts, total=total)
    found, pairs = choice.flatten().sort(stable=True)
    if tokens == 1:
        assert torch.equal(order.pairs, torch.arange(chosen).int()), "as they were chosen"
        assert torch.equal(order.places, order.pairs)
        return
    assert torch.equal(order.pairs.long(), pairs)
    assert torch.equal(order.places.long(), pairs.argsort())
    assert torch.equal(order.starts.diff(), torch.bincount(found, minlength=experts).int())
    assert int(total) == (1 << 40) + len(pairs)


@triton.jit
def _numbers(pairs, low, high, is_mxfp4: tl.constexpr, bf16: tl.constexpr):
    at = tl.arange(0, 256)
    lower, upper = numbers_of(tl.load(pairs + at), is_mxfp4, bf16)
    tl.store(low + at, lower)
    tl.store(high + at, upper)


def check_numbers(dtype: torch.dtype) -> None:
    """Of every byte, bit for bit."""
    pairs = torch.arange(256, dtype=torch.uint8)
    table = torch.tensor([*mxfp4.NUMBERS, *(-number for number in mxfp4.NUMBERS)])
    offset = 128 if dtype == torch.bfloat16 else 1024
    for is_mxfp4, numbers in ((True, table), (False, torch.arange(16) + offset)):
        low, high = torch.empty(2, 256, dtype=dtype)
        _numbers[(1,)](pairs, low, high, is_mxfp4, dtype == torch.bfloat16)
        for got, code in ((low, pairs & 15), (high, pairs >> 4)):
            want = numbers.to(dtype)[code.int()]
            assert torch.equal(got.view(torch.int16), want.view(torch.int16)), (dtype, is_mxfp4)


def check_mixed(
    precision: str,
    tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    kind: str = "any",
    gate: Gate = Gate(),  # noqa: B008 (frozen)
    bias: bool = False,
    experts: int = 6,
    sizes: tuple[int, int] | None = None,
    ranks: int = 1,
) -> None:
    """The interpreter knows no products of bfloat16, so 16 bits are float16 here. `ranks`: among
    which the experts are divided."""
    hidden, width = sizes or ((256, 128) if precision in kit.BLOCKED else (64, 192))
    parts = kit.parts_of(experts, ("gate", "up"), width, hidden)
    gate_up = kit.stacked(precision, parts, dtype, bias)
    down = kit.stacked(precision, kit.parts_of(experts, ("down",), hidden, width), dtype, bias)
    x = torch.randn(tokens, hidden).to(dtype)
    choice = kit.random_choice(tokens, experts, 2, kind)
    weights = cast("list[Stacked]", [gate_up.weights, down.weights])
    chosen = Chosen(choice.weights, choice.experts.int())
    got = torch.zeros(tokens, hidden, dtype=dtype)
    for which in (Held(rank, ranks) for rank in range(ranks)):
        own = [kit.of_rank(each, which) for each in weights]
        here = routing.held(chosen, len(own[0].parts), which)
        with kit.no_numbers():
            got += add_up(parts_of(x, here, *own, gate, ranks=ranks))
    want = kit.exact(x, choice, gate_up, down, gate, dtype)
    error = (got.double() - want).norm() / want.norm()
    # A value between the products may round to FP8 the other way.
    limit = 2e-3 if gate_up.weights.input is not None else 1e-6
    limit = max(limit, 2e-3) if dtype != torch.float32 else limit
    assert error < limit, (precision, tokens, kind, float(error))


def check_row_of_four_bits(
    precision: str, inputs: int, dtype: torch.dtype, cut: Tiles, outputs: int = 24
) -> None:
    """One row with experts in any order. Sizes of inputs differ, from unit to unit as well."""
    known = kit.stacked(precision, kit.parts_of(4, ("gate", "up"), outputs, inputs), dtype, True)
    weights = cast("Stacked", known.weights)
    order = kernels.sort(torch.tensor([[3, 0, 2]], dtype=torch.int32), 4)
    x = torch.randn(3, inputs) * torch.tensor([[1.0], [300.0], [1e-2]])
    x = (x * torch.rand(inputs // 32).pow(4).repeat_interleave(32)).to(dtype)
    x[:, 32:64] = 0
    got = product(x, weights, order, tiles=cut)
    assert weights.bias is not None
    limit = 1e-6 if dtype == torch.float32 else 5e-4
    for number, expert in enumerate((3, 0, 2)):
        want = known.exact[expert] @ x[number].double() + weights.bias[expert].double()
        error = (got[number].double() - want).norm() / want.norm()
        assert error < limit, (precision, inputs, dtype, cut, float(error))
    both = product(x[:1], weights, order, gate=OSS, by_token=True, tiles=cut)
    apart = product(x[:1].expand(3, -1).contiguous(), weights, order, tiles=cut)
    assert torch.equal(both, kernels.activate(apart, OSS)), (precision, cut)
    for wrong in (float("nan"), float("inf"), float("-inf")):
        x[1, inputs - 3] = wrong
        got = product(x, weights, order, tiles=cut)
        assert not got[1].isfinite().any(), "what is no number is not lost"
        assert got[::2].isfinite().all()


def check_sum_and_norm(tokens: int, hidden: int, how: Rounding | None) -> None:
    """In one kernel, to the last bit what is added up before."""
    choice = kit.random_choice(tokens, 6, 3)
    order = kernels.sort(choice.experts.int(), 6)
    parts = Parts(torch.randn(3 * tokens, hidden).half(), order, choice.weights)
    precision = Precision(kit.CPU, torch.float16)
    norm = RmsNorm(hidden, 1e-6, Build(torch.float16, kit.CPU, precision, Shard(), Alone()))
    norm.weight.data.normal_()
    residual = torch.randn(tokens, hidden).half()
    other, join = residual.clone(), Join(None, norm, lambda: how, 1.0)
    got, want = joined(residual, parts, join), joined(other, add_up(parts), join)
    assert torch.equal(residual, other)
    pairs = [(got, want)] if how is None else zip(got, want, strict=True)
    for one, two in ((one, two) for one, two in pairs if two is not None):
        assert torch.equal(one.float(), two.float()), how


def check_rows_of_pairs(how: Rounding | None, ranks: int) -> None:
    """To the last bit: rows that are taken in one kernel, and rounded by the one that makes
    them."""
    choice = routing.held(kit.random_choice(9, 6, 2), 6 // ranks, Held(0, ranks))
    order = kernels.sort(choice.experts.int(), 6 // ranks, ranks)
    tokens, own = order.pairs.long() // 2, int(order.starts[-1])
    x, both = torch.randn(9, 256).half(), torch.randn(18, 512).half()
    both[3], both[4, 0] = 0, float("nan")
    if how is None or how.group is None:
        read = x if how is None else rounded(x, how)
        got = kernels.take(read, order)
        same_bits(got, (read[tokens],) if how is None else [one[tokens] for one in read[:2]])
    plain = kernels.activate(both, OSS, order)
    done = kernels.activate(both, OSS, order, how)
    want = (plain,) if how is None else rounded(plain, how)
    same_bits(done, [one if one is None else one[:own] for one in want], own)


def same_bits(got: object, want: object, rows: int | None = None) -> None:
    for one, two in zip((got,) if isinstance(got, torch.Tensor) else got, want, strict=False):
        if two is not None:
            mine, other = (each.contiguous().view(torch.uint8) for each in (one[:rows], two))
            assert torch.equal(mine, other)


def check_layer(shared: bool, tokens: int) -> None:
    """The whole feed-forward, against PyTorch over the same weights."""
    with mock.patch.object(Precision, "on_gpu", True):
        layer = kit.layer(shared, Routing(6, 2, normalised=True))
    for module in layer.modules():
        if isinstance(module, kit.Linear):
            module.method.finish(CudaProducts())
    x = torch.randn(tokens, 64)
    got = feed_forward.run(layer, x)
    got = add_up(got) if isinstance(got, Parts) else got
    for module in layer.modules():
        if isinstance(module, kit.Linear):
            module.method.finish()
    torch.testing.assert_close(got, layer(x))


def check_shared(precision: str, alike: bool) -> None:
    """A shared expert of one row, in the kernels of the others where its weights are like theirs:
    as if it were computed apart."""
    layer = kit.filled_layer(precision, Routing(6, 2), CudaProducts(), 128 if alike else 64)
    x, names = torch.randn(1, 512), []

    def seen(kernel, *arguments, **options):
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    launch = one_row.launch
    with ExitStack() as stack:
        for module in (one_row, single_row, products_of_row, unrounded_row):
            stack.enter_context(mock.patch.object(module, "launch", seen))
        got = add_up(feed_forward.run(layer, x))
        beside = [name for name in names if name != "_one_row"]
        with mock.patch.object(feed_forward, "beside_of", return_value=None):
            apart = add_up(feed_forward.run(layer, x))
    assert names.count("_one_row") == 4, "two products of all experts"
    assert len(beside) == (1 if alike else 3), "of the router alone, or with two of it"
    torch.testing.assert_close(got, apart, rtol=1e-5, atol=1e-5)


def main() -> None:
    """One case of each kernel, or all cases."""
    torch.manual_seed(0)
    interpreter._convert_float = convert_as_a_gpu_does
    interpreted_ptx.teach()
    check_numbers(torch.bfloat16)
    check_numbers(torch.float16)
    check_route(ROUTINGS["normalised"])
    check_sort(9, 6, 2, "few")
    check_layer(shared=True, tokens=3)
    check_shared("fp8", alike=True)
    for how in (None, Rounding(), Rounding(scale=torch.tensor([0.02])), Rounding(keeps=True)):
        check_sum_and_norm(1, 72, how)
    check_sum_and_norm(5, 256, Rounding(group=128))
    for ranks in (1, 2):
        for how in (None, Rounding(), Rounding(scale=torch.tensor([0.02])), Rounding(group=128)):
            check_rows_of_pairs(how, ranks)
    for precision in ("fp8", "int4-zeros", "mxfp4"):
        for tokens in (1, 2):
            check_mixed(precision, tokens, gate=OSS, bias=True, experts=3)
            check_mixed(precision, tokens, gate=OSS, bias=True, ranks=2)
    check_mixed("float", 1, gate=OSS, bias=True, experts=3)
    check_mixed("float", 40, ranks=3)
    by_torch = mock.patch.object(mixing, "groups_in_one_kernel", return_value=True)
    with by_torch, mock.patch.object(mixing, "FEW_ROWS", 30):
        check_mixed("float", 40, gate=OSS, bias=True, ranks=2)
    check_row_of_four_bits("mxfp4", 288, torch.float16, Tiles(8, 128, 1, 1), 10)
    check_row_of_four_bits("int4-zeros", 192, torch.float32, Tiles(16, 64, 1, 1), 10)
    if "all" in sys.argv:
        for how in ROUTINGS.values():
            check_route(how)
        check_what_is_no_number()
        for tokens, experts, chosen, kind in (
            (1, 8, 8, "any"), (300, 6, 2, "few"), (17, 5, 1, "one"), (1100, 7, 2, "any"),
        ):  # fmt: skip
            check_sort(tokens, experts, chosen, kind)
        check_layer(shared=False, tokens=1)
        check_layer(shared=True, tokens=1)
        for precision, alike in (("float", True), ("fp8-blocks", True), ("fp8", False)):
            check_shared(precision, alike)
        for precision in kit.PRECISIONS:
            for tokens, kind in ((1, "any"), (2, "one"), (20, "few"), (70, "one"), (300, "any")):
                check_mixed(precision, tokens, kind=kind)
                check_mixed(precision, tokens, kind=kind, ranks=2)
                print(precision, tokens, kind, flush=True)
            check_mixed(precision, 5, dtype=torch.float16, gate=OSS, bias=True)
        for precision, sizes in (
            ("float", (72, 200)), ("float", (4800, 72)), ("fp8", (80, 4160)),
            ("fp8-static", (4800, 96)), ("fp8-blocks", (384, 4224)),
            ("mxfp4", (288, 96)), ("int4", (96, 288)), ("int4-zeros", (320, 192)),
            ("int4-channel", (80, 40)), ("int4-channel", (72, 296)),
        ):  # fmt: skip
            for tokens in (1, 30):
                check_mixed(precision, tokens, gate=OSS, bias=True, sizes=sizes)
        for precision, inputs, cut in (
            ("mxfp4", 2880, (8, 512)), ("mxfp4", 1056, (4, 256)), ("int4", 1440, (8, 512)),
            ("int4-zeros", 1088, (2, 512)), ("int4-channel", 992, (16, 1024)),
        ):  # fmt: skip
            for dtype in (torch.float32, torch.float16):
                check_row_of_four_bits(precision, inputs, dtype, Tiles(*cut, 1, 1))
    print("all equal")


if __name__ == "__main__":
    main()
