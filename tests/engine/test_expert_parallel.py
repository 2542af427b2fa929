"""Whole experts a rank: what a rank holds and reads, the tokens of one rank by every path, and what
is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import build, finish, running, submit
from paths_kit import prompt_of
from quantised_experts import write_mxfp4
from references import references
from test_ranks import (
    FAMILIES,
    SMALL,
    Pair,
    speaks,
    test_fingerprint_and_limits_do_not_depend_on_the_ranks,
    test_log_probabilities_of_prompt_and_output,
    test_preempted,
    test_rank_0_samples_for_all,
    test_whole_in_chunks_from_the_cache_and_resumed,
)
from tiny_families import EXPERTS, HYBRIDS
from tiny_models import write_tiny_model

from engine.engine import EngineError
from engine.model import ModelError, load_model
from engine.model.decoder import Layer
from engine.model.experts.config import Held
from engine.model.experts.layer import Experts
from engine.model.experts.routing import Chosen, held
from engine.model.shard import Shard

pytestmark = pytest.mark.timeout(300)
__all__ = [
    "test_fingerprint_and_limits_do_not_depend_on_the_ranks",
    "test_log_probabilities_of_prompt_and_output",
    "test_preempted",
    "test_rank_0_samples_for_all",
    "test_whole_in_chunks_from_the_cache_and_resumed",
]
OTHERS = ("deepseek_v2", "deepseek_v3", "lfm2_moe", "gemma4_experts")
GRIDS = [("glm4_moe", 1, 2), *((name, 1, 2) for name in (*EXPERTS, *OTHERS))]
GRIDS += [("qwen3_moe", 1, 4), ("gpt_oss", 1, 4), ("qwen3_moe", 2, 2)]


def cases() -> list[Any]:
    return [
        pytest.param(each, id="{}-{}x{}".format(*each), marks=pytest.mark.matrix)
        for each in dict.fromkeys(GRIDS)
    ]


@pytest.fixture(scope="module", params=cases())
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    family, pp, tp = request.param
    path = write_tiny_model(tmp_path_factory.mktemp(family), **FAMILIES[family])
    grid = {"pp": pp, "tp": tp, "expert_parallel": True}
    with running(path, **SMALL) as one, running(path, **grid, **SMALL) as several:
        yield Pair(one, several, references(path))


def test_the_tokens_of_two_ranks(tmp_path):
    """The case of `make test`: `pair` and what uses it are a matrix."""
    path = write_tiny_model(tmp_path, **FAMILIES["glm4_moe"])
    with running(path, tp=2, expert_parallel=True, **SMALL) as several:
        speaks(Pair(several, several, references(path)), (17, 150))
        assert all(load.pairs for load in several.ranks.loads())


@pytest.mark.matrix
@pytest.mark.parametrize(
    "family", ["qwen3_5_moe", "qwen3_next", "granite4_experts", "nemotron_h_experts"]
)
def test_models_that_keep_states(family, tmp_path):
    path = write_tiny_model(tmp_path, tokenizer=False, **HYBRIDS[family])
    options = {"num_pages": 60, "max_sequences": 4, "max_step_tokens": 96}
    with running(path, tp=2, expert_parallel=True, **options) as engine:
        for _ in range(2):
            runs = [submit(engine, prompt_of(length), 8, ignore_eos=True) for length in (5, 150)]
            finish(*runs)
            for run in runs:
                references(path, whole=True).check(run, 8)


# -- what a rank holds --------------------------------------------------------------------------


def load(path: Path, rank: int = 0, count: int = 1, **options: Any) -> Any:
    experts = Held(rank, count) if count > 1 else None
    shard = Shard(rank, count, experts=experts)
    return load_model(
        str(path), dtype=torch.float32, device=torch.device("cpu"), shard=shard, **options
    )


def experts_of(loaded: Any) -> Experts:
    layer = loaded.model.layers[-1]
    assert isinstance(layer, Layer)
    assert isinstance(layer.feed_forward, Experts)
    return layer.feed_forward


FORMS = {
    "float": ("glm4_moe", {}),
    "bias": ("gpt_oss", {}),
    "fp8": ("qwen3_moe", {"quantization": "fp8"}),
    "mxfp4": ("gpt_oss", {}),
    "dummy": ("mixtral", {"load_format": "dummy"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_ranks_hold_whole_experts_and_add_up_to_one(form, tmp_path):
    """Each expert lies on one rank, bit for bit, and no other rank reads more of it than its ends,
    for the revision."""
    family, options = FORMS[form]
    path = write_tiny_model(tmp_path / "one", tokenizer=False, **EXPERTS[family])
    if form == "mxfp4":
        path, source = tmp_path / "mxfp4", path
        write_mxfp4(source, path, tmp_path / "floats")
    one = load(path, **options)
    ranks = [load(path, rank, 2, **options) for rank in range(2)]
    assert {loaded.revision for loaded in ranks} == {one.revision}
    whole, own = experts_of(one), [experts_of(loaded) for loaded in ranks]
    for name in ("gate_up", "down"):
        every = getattr(whole, name)
        for at, method in enumerate(every.methods):
            held_by = getattr(own[at % 2], name)
            assert len(held_by.methods) * 2 == len(every.methods)
            for mine, theirs in zip(
                held_by.methods[at // 2].parameters(), method.parameters(), strict=True
            ):
                assert torch.equal(mine, theirs)
            if every.bias is not None:
                assert torch.equal(held_by.bias[at // 2], every.bias[at])
    for loaded in (one, *ranks):
        loaded.model.finish()
    x = torch.randn(9, one.config.hidden_size, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(own[0](x) + own[1](x), whole(x), rtol=1e-4, atol=1e-5)


def test_a_rank_of_which_no_expert_is_chosen_adds_nothing():
    chosen = Chosen(torch.tensor([[0.7, 0.3], [0.6, 0.4]]), torch.tensor([[4, 0], [2, 5]]))
    own = held(chosen, 3, Held(1, 2))
    assert own.experts.tolist() == [[3, 3], [3, 2]]
    torch.testing.assert_close(own.weights, torch.tensor([[0.0, 0.0], [0.0, 0.4]]))


# -- what is refused ----------------------------------------------------------------------------

REFUSED = {
    "expert_parallel divides experts among the ranks of tp, and tp is 1": ("mixtral", {"tp": 1}),
    "expert_parallel is for models with experts, and this one has none": ("llama", {}),
    "nodes 2 need `baton worker` on each host": ("mixtral", {"nodes": 2}),
    "expert_parallel and expert_group cannot be set: transformers' own code runs this model": (
        "qwen3_moe",
        {"model_impl": "transformers"},
    ),
    "expert_parallel with 2 ranks does not fit this model: it does not divide 5 experts; these": (
        "five",
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_divided_is_refused(why, tmp_path, weights_unread):
    family, options = REFUSED[why]
    five = FAMILIES["mixtral"] | {"num_local_experts": 5}
    path = write_tiny_model(tmp_path, tokenizer=False, **(FAMILIES | {"five": five})[family])
    with pytest.raises((EngineError, ModelError), match=f"^{why}"):
        build(path, **{"tp": 2, "expert_parallel": True} | options)


def test_ranks_that_would_cut_a_block_hold_whole_experts(tmp_path):
    """Where a slice of an expert's width would cut a quantised block."""
    source = write_tiny_model(tmp_path / "one", tokenizer=False, **EXPERTS["gpt_oss"], hidden=32)
    write_mxfp4(source, tmp_path / "mxfp4", tmp_path / "floats")
    with pytest.raises(ModelError, match="cannot be cut within 32 channels"):
        load_model(
            str(tmp_path / "mxfp4"),
            dtype=torch.float32,
            device=torch.device("cpu"),
            shard=Shard(3, 4),
        )
    assert len(experts_of(load(tmp_path / "mxfp4", 3, 4)).down.methods) == 1
