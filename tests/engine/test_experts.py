"""Experts against float64, in every precision and as CPUs and GPUs keep them; routing against
transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import experts_kit as kit
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.experts.config import Gate, Routing, Scores
from engine.model.experts.products import by_expert, mixed
from engine.model.experts.routing import Chosen, route
from engine.model.precision import mxfp4

GATES = [Gate(), Gate(sharpness=1.702, shift=1.0, limit=1.0)]
KEPT = {"listed": kit.listed, "stacked": kit.stacked}


def rounds(precision: str) -> bool:
    return precision.startswith("fp8")


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("precision", kit.PRECISIONS)
@settings(max_examples=3, deadline=None)
@given(
    tokens=st.one_of(st.integers(1, 20), st.integers(1, 300)),
    kind=st.sampled_from(["any", "one", "few"]),
    gate=st.sampled_from(GATES),
    bias=st.booleans(),
    chosen=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_experts_equal_float64(precision, kept, tokens, kind, gate, bias, chosen, seed):
    """All rows on some experts, and experts without a row, too."""
    torch.manual_seed(seed)
    hidden, width = (256, 128) if precision in kit.BLOCKED else (64, 192)
    make = KEPT[kept]
    parts = kit.parts_of(6, ("gate", "up"), width, hidden)
    gate_up = make(precision, parts, torch.float32, bias)
    down = make(precision, kit.parts_of(6, ("down",), hidden, width), torch.float32, bias)
    x = torch.randn(tokens, hidden)
    choice = kit.random_choice(tokens, 6, chosen, kind)
    got = mixed(x, choice, gate_up.weights, down.weights, gate)
    want = kit.exact(x, choice, gate_up, down, gate, torch.float32)
    error = (got.double() - want).norm() / want.norm()
    # In FP8 a value between the products may round the other way.
    assert error < (2e-3 if rounds(precision) else 1e-6)


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 300), chosen=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_pairs_are_sorted_by_expert_and_then_by_token(tokens, chosen, seed):
    torch.manual_seed(seed)
    experts = kit.random_choice(tokens, 7, chosen, "few").experts
    order, counts = by_expert(experts, 7)
    found = experts.flatten()[order]
    assert torch.equal(found.sort().values, found)
    assert torch.equal(counts, torch.bincount(found, minlength=7))
    assert all((order[found == e].diff() > 0).all() for e in range(7))


# -- routing ------------------------------------------------------------------------------------


def test_equal_scores_go_to_the_lowest_numbers():
    for scores in Scores:
        assert route(torch.zeros(3, 8), Routing(8, 3, scores)).experts.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("normalised", [False, True])
def test_softmax_is_that_of_qwen(normalised):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = SimpleNamespace(
        num_experts_per_tok=4, num_experts=16, num_local_experts=16, hidden_size=24,
        norm_topk_prob=normalised,
    )  # fmt: skip
    check(Qwen3MoeTopKRouter(config), Routing(16, 4, normalised=normalised))


def test_groups_are_those_of_deepseek():
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = SimpleNamespace(
        num_experts_per_tok=5, num_local_experts=24, hidden_size=24, norm_topk_prob=True,
        routed_scaling_factor=2.5, n_group=4, topk_group=2,
    )  # fmt: skip
    router = DeepseekV3TopkRouter(config)
    router.e_score_correction_bias.normal_(0, 0.5)
    how = Routing(
        24, 5, Scores.SIGMOID, normalised=True, factor=2.5, groups=4, open_groups=2,
        best_of_group=2, bias=True,
    )  # fmt: skip
    check(router, how, router.e_score_correction_bias)


def test_softmax_of_chosen_is_that_of_gpt_oss():
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter

    config = SimpleNamespace(num_experts_per_tok=4, num_local_experts=16, hidden_size=24)
    router = GptOssTopKRouter(config)
    check(router, Routing(16, 4, Scores.SOFTMAX_OF_CHOSEN))


def check(router: torch.nn.Module, how: Routing, bias: torch.Tensor | None = None) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        router.weight.normal_()
        logits, weights, experts = router(torch.randn(50, 24))
        found = route(logits, how, bias)
    dense = [torch.zeros(50, how.experts).scatter_(1, *pair) for pair in (
        (experts, weights), (found.experts, found.weights)
    )]  # fmt: skip
    torch.testing.assert_close(*dense)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chosen": 9},
        {"chosen": 0},
        {"groups": 3},
        {"groups": 4, "open_groups": 1, "chosen": 3},
    ],
)
def test_a_routing_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="experts"):
        Routing(**{"experts": 8, "chosen": 2, **wrong})


# -- MXFP4 --------------------------------------------------------------------------------------


def test_every_mxfp4_value_is_that_of_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)
    exponents = torch.tensor([[100, 120, 127, 130]] * 4, dtype=torch.uint8)[None]
    want = convert_moe_packed_tensors(blocks, exponents, dtype=torch.float32)[0].T
    values = torch.stack((blocks & 15, blocks >> 4), -1).view(4, 128)
    assert torch.equal(mxfp4.dequantised(values, exponents[0]), want)


def test_rounding_to_mxfp4_takes_the_nearest_number():
    torch.manual_seed(0)
    weight = torch.randn(16, 96) * torch.logspace(-6, 6, 16)[:, None]
    weight[3, :32] = 0
    values, exponents = mxfp4.quantised(weight)
    scale = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    numbers = torch.tensor([*mxfp4.NUMBERS, *(-number for number in mxfp4.NUMBERS)])
    nearest = (numbers * scale[..., None] - weight[..., None]).abs().amin(-1)
    assert torch.equal((mxfp4.dequantised(values, exponents) - weight).abs(), nearest)
    again = mxfp4.quantised(mxfp4.dequantised(values, exponents))
    assert torch.equal(mxfp4.dequantised(*again), mxfp4.dequantised(values, exponents))


def test_weights_of_tokens_that_are_no_number_spoil_no_other_token():
    parts = kit.parts_of(4, ("gate", "up"), 32, 32)
    gate_up = kit.stacked("float", parts, torch.float32, False).weights
    down = kit.stacked("float", kit.parts_of(4, ("down",), 32, 32), torch.float32, False).weights
    logits = torch.randn(3, 4)
    logits[1] = float("nan")
    chosen = route(logits, Routing(4, 2))
    out = mixed(torch.randn(3, 32), chosen, gate_up, down, Gate())
    assert out.isfinite().all(1).tolist() == [True, False, True]
    assert isinstance(chosen, Chosen)
