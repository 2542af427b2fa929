"""Quest on a GPU: its choice in graphs and beside them, and its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from breaking_hooks import POINTS
from engine_kit import build, check_baseline, finish, hand_off, held, submit
from hooks_kit import ALL, QUEST, check_rank_1, installed
from test_cuda_ranks import two_gpus
from tiny_models import write_tiny_model

from engine.engine import Engine, EngineError
from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionSpec
from engine.step.hooks import DecodeRows, HookSite, StepRows
from engine.types import SamplingParams, TokenRecord

pytestmark = pytest.mark.gpu
SPARSE, COVERS = "quest?sparse_tokens=256", "quest?sparse_tokens=1024"
SHAPE = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 128, "layers": 5}
LENGTHS = (500, 330, 90, 700)
TOKENS = 24
"""Of each request. Pages are completed on the way."""
PAGE, HEADS, GROUP, DIM = 16, 2, 4, 128
CUDA = torch.device("cuda")
KERNELS = "_summarise", "_score", "_select"
Records = dict[int, list[TokenRecord]]
"""By the length of the prompt."""


@pytest.fixture(scope="module", autouse=True)
def hooks(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("installed"), ALL, QUEST):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("quest") / "model", tokenizer=False, **SHAPE)


@contextmanager
def running(path, *hooks: str, **options) -> Iterator[Engine]:
    """An engine that stops also if the test fails: it would hold the device beside later ones."""
    defaults = {"device": "cuda", "max_step_tokens": 256, "max_sequences": 8, "num_pages": 600}
    engine = build(path, **{**defaults, "hooks": hooks, "hook_limit_s": 60.0, **options})
    try:
        yield engine
        check_baseline(engine)
    finally:
        engine.stop()


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, 384, length).tolist()


def records(engine, *lengths: int, together: bool = False, **options) -> Records:
    """Greedy, with log probabilities. One after the other, unless told: then all are there before
    the first step, since how many rows a step has decides the last bits."""
    sampling = SamplingParams(temperature=0.0, top_logprobs=2)
    options = {"sampling": sampling, "ignore_eos": True, **options}
    runs = []
    with held(engine) if together else nullcontext():
        for length in lengths:
            runs.append(submit(engine, prompt_of(length), TOKENS, **options))
            if not together:
                finish(runs[-1])
    if together:
        finish(*runs)
    assert not engine.load().hook_failures
    uncut = engine._loop._scheduler.budget.tokens == engine.max_step_tokens
    assert uncut, "a step lacked memory, and came again in parts"
    return {length: run.records[0] for length, run in zip(lengths, runs, strict=True)}


def differences(found: Records, wanted: Records) -> list[str]:
    """Of each request that differs: the first token that does, and how many do."""
    told = []
    for length, got in found.items():
        want = wanted[length]
        assert len(got) == len(want) == TOKENS
        if at := [token for token in range(TOKENS) if got[token] != want[token]]:
            first = at[0]
            told.append(
                f"prompt of {length}: {len(at)} of {TOKENS} tokens differ, the first is {first}:"
                f" {got[first]} for {want[first]}"
            )
    return told


class OfGraphs(NamedTuple):
    """What an engine with graphs says."""

    options: dict[str, Any]
    alone: Records
    together: Records
    narrowed: set[int]
    """Decode rows of its graphs for narrowed rows."""


@pytest.fixture(scope="module", params=["auto", "fp8"])
def of_graphs(path, request) -> OfGraphs:
    # No page is cached, so that requests get pages of others that were summarised.
    options = {"kv_cache_dtype": request.param, "prefix_cache": False}
    with running(path, SPARSE, **options) as engine:
        shapes = engine._loop._executor._graphs
        narrowed = {shape.decodes for shape in shapes if shape.narrowed}
        alone = records(engine, *LENGTHS)
        return OfGraphs(options, alone, records(engine, *LENGTHS, together=True), narrowed)


def test_narrowed_rows_have_graphs_of_all_sizes(of_graphs):
    """The first part of each precision: its engine compiles the kernels."""
    assert of_graphs.narrowed == {1, 2, 4, 8}


def test_graphs_give_what_the_kernels_give(path, of_graphs):
    with running(path, SPARSE, cuda_graphs=False, **of_graphs.options) as engine:
        assert not engine._loop._executor._graphs
        assert not differences(of_graphs.alone, records(engine, *LENGTHS))
        assert not differences(of_graphs.together, records(engine, *LENGTHS, together=True))


def test_what_is_within_the_budget_alone_is_dense(path, of_graphs):
    with running(path, **of_graphs.options) as engine:
        told = differences(of_graphs.alone, records(engine, *LENGTHS))
    assert [each.split(":")[0] for each in told] == [f"prompt of {n}" for n in (500, 330, 700)]


def test_a_budget_that_covers_the_context_is_dense(path):
    with running(path, COVERS) as engine:
        found = records(engine, *LENGTHS)
    with running(path) as engine:
        assert not differences(found, records(engine, *LENGTHS))


def test_rows_that_read_more_than_a_graph_run_beside_it(path):
    """A request of its own number: fewer pages in the same graph, more without one."""
    with running(path, SPARSE) as engine, running(path, "quest?sparse_tokens=512") as other:
        for tokens in (b"256", b"512"):
            found, wanted = (
                records(one, 700, 90, extensions={"quest": tokens}) for one in (engine, other)
            )
            assert not differences(found, wanted), tokens


@pytest.mark.parametrize("attention", ["fa3", "sdpa"])
def test_without_graphs_all_kernels_are_compiled_before_the_first_step(path, attention):
    """A request would fail that had to wait for them."""
    kernels = [getattr(import_module("baton_quest_kernels"), name) for name in KERNELS]
    for kernel in kernels:
        kernel.device_caches.clear()  # As in a process of its own.

    def compiled() -> list[int]:
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    with running(path, SPARSE, cuda_graphs=False, attention=attention) as engine:
        before = compiled()
        assert min(before) > 0
        records(engine, *LENGTHS, together=True)
        records(engine, 1500)
        assert compiled() == before


def test_sparse_rows_beside_dense_ones_and_prompts(path):
    """Whatever comes together, every request gets to its end. So do hand-offs."""
    with running(path, SPARSE) as engine, running(path, decodes=False) as prefill:
        for _ in range(3):
            records(engine, *LENGTHS, together=True)
        handed = hand_off(prefill, engine, prompt_of(500), TOKENS, ignore_eos=True)
        assert len(handed.tokens[0]) == TOKENS


@pytest.mark.parametrize("kind", [PlainPool, Fp8Pool])
def test_kernels_choose_what_pytorch_chooses(kind):
    from baton_quest import Quest

    torch.manual_seed(0)
    pages, contexts = 3000, np.array([20000, 700, 31, 1, 9001], np.int32)
    pool = kind(
        num_pages=pages, num_layers=4, num_kv_heads=HEADS, head_dim=DIM, page_size=PAGE,
        dtype=torch.float32, device=CUDA,
    )  # fmt: skip
    at = torch.arange(pages, device=CUDA).repeat_interleave(PAGE)
    for layer in range(4):
        k, v = torch.randn(2, pages * PAGE, HEADS, DIM, device=CUDA)
        pool.write(layer, at, torch.arange(PAGE, device=CUDA).repeat(pages), k, v)
    hook = Quest(2048)
    hook.attach(HookSite(pool, (AttentionSpec(1.0),) * 4, decodes=True))
    table = np.stack([np.random.default_rng(row).permutation(pages)[:1300] for row in range(5)])
    step = StepRows(
        number=0, tags=np.full(5, 128, np.int32), query_lens=np.ones(5, np.int32),
        context_lens=contexts, num_decodes=5, prompts_at=5, page_table=table.astype(np.int32),
        page_size=PAGE, arrived=np.arange(8, pages, dtype=np.int32),
    )  # fmt: skip
    counts = np.array([128, 20, 0, 0, 100], np.int32)
    rows = DecodeRows(
        torch.from_numpy(step.page_table).to(CUDA), torch.from_numpy(contexts).to(CUDA),
        torch.from_numpy(counts).to(CUDA), 128, PAGE,
    )  # fmt: skip
    hook.step_began(step)
    summaries, q = hook._summaries.clone(), torch.randn(5, HEADS * GROUP, DIM, device=CUDA)
    hook.choosing_began(rows)
    got = hook.pages_wanted(2, q)
    known, hook._choice = hook._is_summarised == 1, None  # From here on by PyTorch.
    hook.step_began(step)
    assert torch.equal(hook._summaries[:, known], summaries[:, known])
    hook.choosing_began(rows)
    want = hook.pages_wanted(2, q)
    assert torch.equal(got[counts > 0], want[counts > 0])


# -- two GPUs -----------------------------------------------------------------------------------

MINUTES = pytest.mark.timeout(600)
"""Each engine has two processes, and compiles and captures in both."""
FEW_GRAPHS = {"max_sequences": 2, "max_step_tokens": 128}
"""For tests that run two requests at a time: a start captures few graphs."""


def graphs_of(engine) -> dict[Any, Any]:
    """Those of rank 0."""
    return engine._loop._executor._own._graphs


@two_gpus
@MINUTES
def test_two_ranks_with_a_budget_that_covers_the_context_are_dense(path):
    with running(path, COVERS, tp=2) as engine:
        found = records(engine, *LENGTHS)
    with running(path, tp=2) as engine:
        assert not differences(found, records(engine, *LENGTHS))


@two_gpus
@MINUTES
def test_two_ranks_in_graphs_give_what_the_kernels_give(path):
    """Each rank chooses by its own heads, in graphs and beside them. What a request of another
    number needs is in no graph."""
    options = {"prefix_cache": False, "tp": 2}
    more = {"extensions": {"quest": b"512"}}
    with running(path, SPARSE, **options) as engine:
        narrowed = {shape.decodes for shape in graphs_of(engine) if shape.narrowed}
        assert narrowed == {1, 2, 4, 8}
        alone = records(engine, *LENGTHS)
        together = records(engine, *LENGTHS, together=True)
        beside = records(engine, 700, **more)
    with running(path, SPARSE, cuda_graphs=False, **options) as engine:
        assert not graphs_of(engine)
        assert not differences(alone, records(engine, *LENGTHS))
        assert not differences(together, records(engine, *LENGTHS, together=True))
        assert not differences(beside, records(engine, 700, **more))
    with running(path, **options) as engine:
        told = differences(alone, records(engine, *LENGTHS))
    assert [each.split(":")[0] for each in told] == [f"prompt of {n}" for n in (500, 330, 700)]


@two_gpus
@MINUTES
@pytest.mark.parametrize("graphs", ["no", "yes"])
def test_a_hook_that_raises_on_one_of_two_gpus(path, graphs):
    """In a graph nothing is called in layers. `test_hooks.py` has the same on CPUs."""
    points = POINTS[2:] if graphs == "no" else ("rows_narrowed", "step_began", "step_ended")
    options = {"tp": 2, "prefix_cache": False, **FEW_GRAPHS}
    with running(path, f"on-rank-1?graphs={graphs}", **options) as engine:
        assert any(shape.narrowed for shape in graphs_of(engine)) == (graphs == "yes")
        check_rank_1(engine, points)


@two_gpus
@MINUTES
def test_a_hook_that_cannot_be_attached_on_one_of_two_gpus(path):
    """Rank 0 waits on its device for what rank 1 never sends, and is let go."""
    with pytest.raises(EngineError, match="rank 1: hook on-rank-1 cannot be attached"):
        build(path, hooks=("on-rank-1?attaches=no",), tp=2, device="cuda", **FEW_GRAPHS)
