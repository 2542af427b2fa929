"""Quest: which pages it chooses, and that it composes with all that moves and keeps pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_kit import build, finish, hand_off, running, stop, submit
from hooks_kit import fixture_of_installed_hooks  # noqa: F401
from tiny_models import write_tiny_model

from engine.engine import Engine
from engine.pool.fp8_pool import Fp8Pool
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionSpec
from engine.step.hooks import DecodeRows, HookSite, StepRows

rng = np.random.default_rng(5)
PROMPT = rng.integers(1, 380, 500).tolist()
OTHER = rng.integers(1, 380, 330).tolist()
SHORT = rng.integers(1, 380, 90).tolist()
SPARSE = "quest?sparse_tokens=256"
COVERS = "quest?sparse_tokens=1024"
PAGE, HEADS, GROUP, SIZE, LAYERS = 16, 2, 3, 8, 4


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("quest") / "model", layers=4)


def run(path, *prompts, max_tokens=24, hooks=(SPARSE,), **options) -> list[list[list[int]]]:
    with running(path, hooks=hooks, **options) as engine:
        runs = [submit(engine, prompt, max_tokens) for prompt in prompts]
        finish(*runs)
        assert not engine.load().hook_failures
    return [each.tokens for each in runs]


@pytest.fixture(scope="module")
def dense(path):
    return run(path, PROMPT, OTHER, SHORT, hooks=())


@pytest.fixture(scope="module")
def sparse(path):
    return run(path, PROMPT, OTHER, SHORT)


# -- which pages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kind", [PlainPool, Fp8Pool])
def test_the_pages_with_the_best_bounds_are_read(kind, in_graph):
    """Against the bound of the paper, written out. In a graph all decode rows come, and as many
    columns in every step."""
    from baton_quest import make

    torch.manual_seed(0)
    pool = kind(
        num_pages=90,
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=SIZE,
        page_size=PAGE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    contexts = np.array([500, 30, 700], np.int32)
    table = np.zeros((3, 44), np.int32)
    pages = rng.permutation(np.arange(1, 90))
    for row, context in enumerate(contexts):
        used = -(-int(context) // PAGE)
        table[row, :used], pages = pages[:used], pages[used:]
    everything = torch.arange(90).repeat_interleave(PAGE), torch.arange(PAGE).repeat(90)
    for layer in range(LAYERS):
        k, v = torch.randn(2, 90 * PAGE, HEADS, SIZE)
        pool.write(layer, *everything, k, v)
    hook = make({"sparse_tokens": "256"})
    plain, sliding = AttentionSpec(1.0), AttentionSpec(1.0, window=100)
    hook.attach(HookSite(pool, (plain, plain, plain, sliding), decodes=True))
    step = StepRows(
        number=0,
        tags=np.array([16, 16, 20], np.int32),
        query_lens=np.ones(3, np.int32),
        context_lens=contexts,
        num_decodes=3,
        prompts_at=3,
        page_table=table,
        page_size=PAGE,
        arrived=np.unique(table)[1:],
    )
    hook.step_began(step)
    narrowed = hook.rows_narrowed(step)
    assert narrowed.rows.tolist() == [0, 2]
    assert narrowed.counts.tolist() == [16, 20]
    assert hook.graph_pages == 16
    q = torch.randn(3, HEADS * GROUP, SIZE)
    rows, counts, most = [0, 2], torch.tensor([16, 20]), 20
    if in_graph:
        rows, counts, most = [0, 1, 2], torch.tensor([16, 0, 20]), 24
    q, lengths = q[rows], torch.from_numpy(contexts[rows])
    hook.choosing_began(DecodeRows(torch.from_numpy(table[rows]), lengths, counts, most, PAGE))
    assert hook.pages_wanted(0, q) is None
    assert hook.pages_wanted(1, q) is None
    assert hook.pages_wanted(3, q) is None  # A layer with a window.
    found = hook.pages_wanted(2, q)
    assert found.shape == (len(rows), HEADS, most)
    for at, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
        used = -(-int(contexts[row]) // PAGE)
        for head in range(HEADS if count else 0):
            best = expected(pool, table[row, :used], q[at], head, count)
            assert table[row, found[at, head, :count]].tolist() == best


def expected(pool, pages, q, head, count) -> list[int]:
    keys, _ = pool.gather(2, pool.places(torch.from_numpy(pages.astype(np.int64))))
    apart = keys[head].view(len(pages), PAGE, SIZE)
    most, least = apart.amax(1), apart.amin(1)
    scores = []
    for page in range(len(pages)):
        own = q[head * GROUP : (head + 1) * GROUP]
        bounds = torch.maximum(own * most[page], own * least[page]).sum(-1)
        scores.append(float(bounds.max()))
    kept = {0, len(pages) - 1}
    for page in sorted(range(len(pages)), key=lambda page: -scores[page]):
        if len(kept) < count:
            kept.add(page)
    return [int(pages[page]) for page in sorted(kept)]


def test_a_head_s_share_of_a_page_is_a_page():
    for kind in (PlainPool, Fp8Pool):
        pool = kind(
            num_pages=5,
            num_layers=2,
            num_kv_heads=3,
            head_dim=8,
            page_size=16,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        at = torch.arange(5).repeat_interleave(16), torch.arange(16).repeat(5)
        pool.write(1, *at, *torch.randn(2, 80, 3, 8))
        whole = pool.gather(1, pool.places(torch.tensor([4, 2])))
        heads = pool.by_head()
        for head in range(3):
            shares = torch.tensor([4, 2]) * 3 + head
            for one, other in zip(heads.gather(1, heads.places(shares)), whole, strict=True):
                assert torch.equal(one[0], other[head])


# -- dense where the budget covers the context ----------------------------------------------------


def test_a_budget_that_covers_the_context_is_dense(path, dense):
    assert run(path, PROMPT, OTHER, SHORT, hooks=(COVERS,)) == dense


def test_short_rows_beside_sparse_ones_are_dense(dense, sparse):
    assert sparse[2] == dense[2]
    assert sparse[0] != dense[0]  # With random weights a sixth of the pages is lost at once.


def test_a_request_may_ask_for_dense(path, dense, sparse):
    with running(path, hooks=(SPARSE,)) as engine:
        runs = [
            submit(engine, PROMPT, 24, extensions={"quest": tokens}) for tokens in (b"0", b"1024")
        ]
        runs.append(submit(engine, PROMPT, 24))
        finish(*runs)
        assert [each.tokens for each in runs] == [dense[0], dense[0], sparse[0]]
        refused = submit(engine, PROMPT, 24, extensions={"quest": b"255"})
        assert refused.done.wait(60)
        assert refused.failed.hook == "quest"


# -- it composes ----------------------------------------------------------------------------------


def pair(path, **options) -> tuple[Engine, Engine]:
    return build(path, decodes=False, **options), build(path, hooks=(SPARSE,), **options)


def test_summaries_are_made_as_pages_arrive(path, sparse):
    prefill, decode = pair(path)
    for prompt, want in ((PROMPT, sparse[0]), (OTHER, sparse[1]), (PROMPT, sparse[0])):
        assert hand_off(prefill, decode, prompt, 24).tokens == want
    assert not decode.load().hook_failures
    stop(prefill, decode)


def test_pages_with_sparsely_decoded_tokens_are_never_keyed(path, dense):
    engine = build(path, hooks=(SPARSE,))
    first = submit(engine, PROMPT, 60, ignore_eos=True)
    finish(first)
    cached: list[list[bytes]] = []
    engine.subscribe(lambda event: cached.append(event))
    follow_up = [*PROMPT, *first.tokens[0], *SHORT]
    again = submit(engine, follow_up, 24, extensions={"quest": b"0"})
    finish(again)
    hits = sum(event.kind.value == "hit" for event in cached)
    assert hits == len(PROMPT) // PAGE
    plain = build(path)
    want = submit(plain, follow_up, 24)
    finish(want)
    assert again.tokens == want.tokens
    stop(engine, plain)


def test_cached_pages_keep_their_summaries(path, sparse):
    with running(path, hooks=(SPARSE,)) as engine:
        for _ in range(3):
            again = submit(engine, PROMPT, 24)
            finish(again)
            assert again.tokens == sparse[0]


@pytest.mark.matrix
def test_choices_fork_off_sparse_prompts(path, sparse):
    with running(path, hooks=(SPARSE,)) as engine:
        both = submit(engine, PROMPT, 24, choices=2)
        finish(both)
        assert both.tokens == [*sparse[0], *sparse[0]]


@pytest.mark.parametrize("tiers", [pytest.param(0, marks=pytest.mark.matrix), 1 << 24])
def test_preempted_sequences_come_back(path, dense, tiers):
    """The pool holds one of them to its end. What is computed again is computed dense."""
    with running(path, hooks=(SPARSE,), num_pages=52, kv_host_bytes=tiers) as engine:
        prompts = OTHER[:300], OTHER[20:320]
        runs = [submit(engine, prompt, 150, ignore_eos=True) for prompt in prompts]
        short = submit(engine, SHORT, 24)
        finish(*runs, short)
        assert short.tokens == dense[2]
        assert all(len(each.tokens[0]) == 150 for each in runs)
        assert engine.load().preemptions >= 1
        assert not engine.load().hook_failures


@pytest.mark.usefixtures("no_hurry")
def test_pages_from_a_tier_get_their_summaries(path, sparse):
    with running(path, hooks=(SPARSE,), num_pages=60, kv_host_bytes=1 << 24) as engine:
        for prompt in (PROMPT, OTHER, [*PROMPT[::-1]], [*OTHER[::-1]]):
            finish(submit(engine, prompt, 24))
        again = submit(engine, PROMPT, 24)
        finish(again)
        assert engine.load().tiers.loaded_tokens["host"] > 0
        assert again.tokens == sparse[0]


@pytest.mark.matrix
def test_a_resumed_request_goes_on(path, dense):
    """Its tokens so far are computed again, dense, as on any worker."""
    with running(path, hooks=(COVERS,)) as engine:
        resumed = submit(engine, PROMPT, 24, generated=[dense[0][0][:10]])
        finish(resumed)
        assert resumed.tokens == [dense[0][0][10:]]


def test_fp8_pages(path):
    options = {"kv_cache_dtype": "fp8"}
    (want,) = run(path, PROMPT, **options)
    prefill, decode = pair(path, **options)
    assert hand_off(prefill, decode, PROMPT, 24).tokens == want
    for engine in (prefill, decode):
        engine.stop()
    (covered,) = run(path, PROMPT, hooks=(COVERS,), **options)
    assert [covered] == run(path, PROMPT, hooks=(), **options)


@pytest.mark.parametrize("spec", [SPARSE, pytest.param(COVERS, marks=pytest.mark.matrix)])
def test_two_ranks_choose_by_their_own_heads(path, spec, sparse, dense):
    want = sparse if spec == SPARSE else dense
    assert run(path, PROMPT, SHORT, hooks=(spec,), tp=2) == [want[0], want[2]]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
        ("mistral", {"sliding_window": 64}),
    ],
)
def test_families(tmp_path, family, options):
    """Layers with a window stay as they are."""
    model = write_tiny_model(tmp_path / family, family=family, layers=4, **options)
    want = run(model, PROMPT, SHORT, hooks=())
    assert run(model, PROMPT, SHORT, hooks=(COVERS,)) == want
    few = run(model, PROMPT, SHORT)
    assert few[1] == want[1]
    assert (few == want) == ("sliding_window" in options)
