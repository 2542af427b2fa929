"""Quest on a GPU: its choice in graphs and beside them, and its kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_kit import build, check_baseline, finish, hand_off, submit
from hooks_kit import ALL, QUEST, installed
from tiny_models import write_tiny_model

from engine.attention import AttentionSpec
from engine.hooks.protocol import DecodeRows, HookSite, StepRows
from engine.pages.fp8_pool import Fp8Pool
from engine.pages.kv_pool import PlainPool
from engine.types import SamplingParams

pytestmark = pytest.mark.gpu
SPARSE, COVERS = "quest?sparse_tokens=256", "quest?sparse_tokens=1024"
SHAPE = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 128, "layers": 5}
LENGTHS = (500, 330, 90, 700)
PAGE, HEADS, GROUP, DIM = 16, 2, 4, 128
CUDA = torch.device("cuda")


@pytest.fixture(scope="module", autouse=True)
def hooks(tmp_path_factory):
    with installed(tmp_path_factory.mktemp("installed"), ALL, QUEST):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("quest") / "model", tokenizer=False, **SHAPE)


def engine_of(path, *hooks: str, **options):
    defaults = {"device": "cuda", "max_step_tokens": 256, "max_sequences": 8, "num_pages": 600}
    return build(path, **{**defaults, "hooks": hooks, "hook_limit_s": 60.0, **options})


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(1, 384, length).tolist()


def records(engine, *lengths: int, together: bool = False, **options) -> list:
    """Greedy, with log probabilities. One after the other, unless told."""
    sampling = SamplingParams(temperature=0.0, top_logprobs=2)
    options = {"sampling": sampling, "ignore_eos": True, **options}
    runs = []
    for length in lengths:
        runs.append(submit(engine, prompt_of(length), 40, **options))
        if not together:
            finish(runs[-1])
    finish(*runs)
    assert not engine.load().hook_failures
    check_baseline(engine)
    return [run.records[0] for run in runs]


@pytest.mark.parametrize("precision", ["auto", "fp8"])
def test_graphs_give_what_the_kernels_give(path, precision):
    found = []
    for graphs in (True, False):
        options = {"cuda_graphs": graphs, "kv_cache_dtype": precision, "prefix_cache": False}
        engine = engine_of(path, SPARSE, **options)
        found.append(records(engine, *LENGTHS))
        if graphs:
            shapes = engine._loop._executor._graphs
            assert {shape.decodes for shape in shapes if shape.narrowed} == {1, 2, 4, 8}
        engine.stop()
    assert found[0] == found[1]
    plain = engine_of(path, kv_cache_dtype=precision, prefix_cache=False)
    dense = records(plain, *LENGTHS)
    plain.stop()
    assert found[0][2] == dense[2]
    assert all(found[0][row] != dense[row] for row in (0, 1, 3))


def test_a_budget_that_covers_the_context_is_dense(path):
    plain, covered = engine_of(path), engine_of(path, COVERS)
    assert records(covered, *LENGTHS) == records(plain, *LENGTHS)
    for engine in (plain, covered):
        engine.stop()


def test_rows_that_read_more_than_a_graph_run_beside_it(path):
    """A request of its own number: fewer pages in the same graph, more without one."""
    engine, other = engine_of(path, SPARSE), engine_of(path, "quest?sparse_tokens=512")
    for tokens in (b"256", b"512"):
        found = [records(one, 700, 90, extensions={"quest": tokens}) for one in (engine, other)]
        assert found[0] == found[1]
    for one in (engine, other):
        one.stop()


def test_sparse_rows_beside_dense_ones_and_prompts(path):
    """Whatever comes together, every request gets to its end. So do hand-offs."""
    engine = engine_of(path, SPARSE)
    for _ in range(3):
        together = records(engine, *LENGTHS, together=True)
        assert [len(each) for each in together] == [40] * len(LENGTHS)
    prefill = engine_of(path, decodes=False)
    handed = hand_off(prefill, engine, prompt_of(500), 40, ignore_eos=True)
    assert len(handed.tokens[0]) == 40
    for one in (engine, prefill):
        check_baseline(one)
        one.stop()


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
        number=0, terms=np.full(5, 128, np.int32), query_lens=np.ones(5, np.int32),
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
