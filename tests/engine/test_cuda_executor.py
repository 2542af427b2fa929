"""Padded steps through the CUDA executor, plan by plan, over a pool of random KV."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from tiny_models import write_tiny_model

from engine.attention import choose_backend
from engine.attention.grouped import PagedGroups
from engine.bounds import Bounds
from engine.cuda.attention_kernels import CudaKernels
from engine.model import load_model
from engine.pool.kv_pool import PlainPool
from engine.pool.pools import one_group
from engine.sampling import Sampler
from engine.step.plan import StepPlan, StepResult
from engine.types import SamplingParams, StopRules

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
NOTHING = np.zeros(0, np.int32)
SLOTS, PAGES, PAGE_SIZE = 40, 4000, 16


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    shape = {"hidden": 512, "heads": 32, "kv_heads": 8, "head_dim": 128}
    path = write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, **shape)
    return load_model(str(path), dtype=torch.bfloat16, device=CUDA)


class Device:
    """An executor whose sequences have random KV: the same for equal seeds, page by page."""

    def __init__(self, loaded, *, graphs: bool, kind=PlainPool, most_context: int = 2048) -> None:
        from engine.cuda.executor import CudaExecutor

        model = loaded.config
        self.pool = kind(
            num_pages=PAGES, num_layers=model.num_layers, num_kv_heads=model.kept.kv_heads,
            head_dim=model.kept.head_dim, page_size=PAGE_SIZE, dtype=torch.bfloat16, device=CUDA,
        )  # fmt: skip
        generator = torch.Generator(CUDA).manual_seed(0)
        if kind is PlainPool:
            self.pool.elements.normal_(generator=generator)
        else:
            self.pool.data.random_(0, 8, generator=generator)  # Small numbers and exponents.
        self.sampler = Sampler(SLOTS, model.vocab_size, CUDA, [0])
        wanted = SamplingParams(temperature=0.0, top_logprobs=5)
        for slot in range(SLOTS):
            self.sampler.assign(slot, wanted, StopRules(99), 0, NOTHING, NOTHING)
        backend = choose_backend("fa3", self.pool, loaded.model.attention_specs, CudaKernels())
        bounds = Bounds(max_sequences=SLOTS, max_step_tokens=1024, max_context_tokens=most_context)
        torch.cuda.synchronize()
        pools = one_group(self.pool)
        self.executor = CudaExecutor(
            loaded.model, pools, PagedGroups([backend], pools.places), self.sampler, bounds
        )
        if graphs:
            self.executor.capture()

    def run(
        self, contexts: list[int], tokens: list[int], seed: int, pieces: tuple[int, ...] = ()
    ) -> StepResult:
        """One step of rows in slots 0, 1, ...; row 0 has the same pages whatever the seed. The last
        rows are pieces of prompts of so many tokens, the others decode."""
        rows, columns = len(contexts), max(contexts) // PAGE_SIZE + 1
        decodes = rows - len(pieces)
        pages = np.random.default_rng(seed).permutation(np.arange(200, PAGES))
        table = pages[: rows * columns].reshape(rows, columns).astype(np.int32)
        table[0] = np.arange(1, columns + 1)
        lens, slots = np.array(contexts, np.int32), np.arange(rows, dtype=np.int32)
        news = np.array([1] * decodes + list(pieces), np.int32)
        positions = [np.arange(end - new, end) for end, new in zip(lens, news, strict=True)]
        plan = StepPlan(
            number=0, token_ids=np.arange(news.sum(), dtype=np.int32) % 380 + 1,
            positions=np.concatenate(positions).astype(np.int32), row_slots=slots,
            query_lens=news, context_lens=lens, num_decodes=decodes, page_table=table,
            sample_tokens=(news.cumsum() - 1).astype(np.int32), sample_slots=slots,
            sample_generations=slots, sample_indices=slots,
            sample=self.sampler.plan(slots, slots), copy_source=NOTHING, copy_target=NOTHING,
            write_slots=slots[:decodes], write_tokens=np.array(tokens[:decodes], np.int32),
        )  # fmt: skip
        return self.executor.launch(plan).result(60)


def random_rows(rows: int, seed: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(seed)
    contexts, tokens = rng.integers(1, 1500, rows), rng.integers(1, 384, rows)
    contexts[0], tokens[0] = 700, 5
    return contexts.tolist(), tokens.tolist()


def assert_same(one: StepResult, two: StepResult, rows: slice) -> None:
    for name in ("tokens", "finite", "logprobs", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(one, name)[rows], getattr(two, name)[rows])


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 16, 23, 40])
def test_a_graph_equals_its_kernels_bit_for_bit(loaded, rows):
    contexts, tokens = random_rows(rows, rows)
    results = [
        Device(loaded, graphs=graphs).run(contexts, tokens, seed=1) for graphs in (True, False)
    ]
    assert results[0].finite.all()
    assert_same(*results, slice(None))


PIECES = [(1,), (16,), (192,), (100, 92), (5, 1, 17, 60), (700,), (600, 400)]


PROMPTS = [(250,), (1000,), (1024,), (300, 500), (7, 90, 1, 64, 8, 33, 120, 5)]


@pytest.mark.parametrize(
    ("rows", "pieces"),
    [*((0, prompts) for prompts in PROMPTS), *product([0, 1, 9, 36], PIECES)],
)
def test_pieces_of_prompts_have_graphs_too(loaded, rows, pieces):
    """Equal to their kernels, and near the step as it is, without padding."""
    contexts, tokens = random_rows(rows + len(pieces), rows + 1)
    contexts[rows:] = [max(*pair) for pair in zip(contexts[rows:], pieces, strict=True)]
    replayed, launched, exact = (Device(loaded, graphs=graphs) for graphs in (True, False, False))
    exact.executor._shapes.of = lambda plan, reads=None: None
    results = [
        device.run(contexts, tokens, seed=1, pieces=pieces)
        for device in (replayed, launched, exact)
    ]
    assert results[0].finite.all()
    assert_same(*results[:2], slice(None))
    # In bf16 the number of rows changes the order of a product's sums; another row's KV would be
    # off by ten times as much.
    apart = np.abs(results[0].logprobs - results[2].logprobs)
    assert apart.mean() < 0.03 + 0.05 / len(apart)
    assert apart.max() < 0.15
    for device in (replayed, launched):
        assert device.pool.elements[0].isfinite().all(), "padding wrote what is no number"


@pytest.mark.parametrize("rows", [2, 4, 8, 24, 40])
def test_a_row_is_the_same_whatever_the_others_of_its_bucket_hold(loaded, rows):
    device = Device(loaded, graphs=True)
    first, *others = (
        device.run(*random_rows(count, seed), seed=seed)
        for seed, count in ((1, rows), (2, rows), (3, max(rows - 1, 2)))
    )
    for other in others:
        assert_same(first, other, slice(0, 1))


def test_tokens_feed_the_next_step_without_the_host(loaded):
    device = Device(loaded, graphs=True)
    contexts, tokens = random_rows(9, 4)
    drawn = device.run(contexts, tokens, seed=5).tokens
    table = device.executor._token_table[:9].cpu().numpy()
    np.testing.assert_array_equal(table, drawn)
