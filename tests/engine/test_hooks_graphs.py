"""Which steps may replay a graph, and what hooks hear of. No GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.sdpa import SdpaBackend
from engine.hooks.attention import CalledAttention, HookedAttention
from engine.hooks.steps import StepHooks
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionBatch, AttentionSpec
from engine.step.hooks import AttentionHook, Hook, HookError, HookSite, Narrowed
from engine.step.plan import StepPlan
from engine.step.sampling import SamplePlan

PAGE, HEADS, SIZE = 4, 2, 8
NOTHING = np.zeros(0, np.int32)


class Heard(AttentionHook):
    """Hears of layers."""

    def __init__(self, name: str, *, capturable: bool = False, breaks: bool = False) -> None:
        self.name, self.capturable, self._breaks = name, capturable, breaks
        self.layers: list[str] = []
        self.prompts_at: list[int] = []

    def step_began(self, step):
        self.prompts_at.append(step.prompts_at)

    def attention_began(self, layer, q, k, v):
        self.layers.append("began")
        if self._breaks:
            raise ZeroDivisionError

    def attention_ended(self, layer, q, out):
        self.layers.append("ended")


class Choosing(Heard):
    """Reads the first page and the last, and in another step what no row has."""

    chooses_pages = True
    beyond = False

    def rows_narrowed(self, step):
        rows = np.flatnonzero(step.tags[: step.num_decodes])
        return Narrowed(rows, np.full(len(rows), 2, np.int32))

    def pages_wanted(self, layer, q):
        return torch.full((len(q), HEADS, 2), 99 if self.beyond else 0)


@pytest.fixture(name="pool")
def fixture_of_pool():
    pool = PlainPool(
        num_pages=9,
        num_layers=1,
        num_kv_heads=HEADS,
        head_dim=SIZE,
        page_size=PAGE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    pool.elements.normal_(generator=torch.Generator().manual_seed(0))
    return pool


def steps_of(pool, *hooks) -> StepHooks:
    return StepHooks(hooks, HookSite(pool, (AttentionSpec(1.0),), decodes=True), 60.0)


def plan_of(*tags: int, hooks: int = 1) -> StepPlan:
    """Decode rows at position 12, each with four pages. `tags` are of the first hook."""
    count = len(tags)
    columns = np.zeros((hooks, count), np.int32)
    columns[0] = tags
    return StepPlan(
        number=0,
        token_ids=np.zeros(count, np.int32),
        positions=np.full(count, 12, np.int32),
        row_slots=np.arange(count, dtype=np.int32),
        query_lens=np.ones(count, np.int32),
        context_lens=np.full(count, 13, np.int32),
        num_decodes=count,
        page_table=np.arange(1, 4 * count + 1, dtype=np.int32).reshape(count, 4),
        sample_tokens=NOTHING,
        sample_slots=NOTHING,
        sample_generations=NOTHING,
        sample_indices=NOTHING,
        sample=SamplePlan(0),
        copy_source=NOTHING,
        copy_target=NOTHING,
        write_slots=NOTHING,
        write_tokens=NOTHING,
        hook_tags=columns,
    )


def choosing(graph_pages: int, *, capturable: bool = True) -> Choosing:
    hook = Choosing("chooses", capturable=capturable)
    hook.graph_pages = graph_pages
    return hook


@pytest.mark.parametrize(
    ("hook", "eager", "graph_pages"),
    [
        (Heard("plain"), True, 0),
        (Heard("fits", capturable=True), False, 0),
        (choosing(2), False, 2),
        (choosing(1), True, 1),  # It reads two pages.
        (choosing(2, capturable=False), True, 0),
        (Hook(), False, 0),  # It is not called in layers.
    ],
    ids=["plain", "fits", "chooses", "chooses more", "chooses and does not fit", "no attention"],
)
def test_a_step_with_rows_of_a_hook_that_fits_no_graph_is_eager(pool, hook, eager, graph_pages):
    hook.name = "one"
    steps = steps_of(pool, hook, Heard("other"))
    assert steps.graph_pages == graph_pages
    for tags, wanted in (((0, 7), eager), ((0, 0), False)):
        plan = plan_of(*tags, hooks=2)
        steps.narrow(plan)
        assert steps.is_eager(plan) == wanted


def test_a_hook_that_fails_as_the_step_begins_narrows_nothing(pool):
    hook = choosing(2)
    hook.step_began = lambda step: 1 / 0
    steps, plan = steps_of(pool, hook), plan_of(0, 7)
    assert steps.narrow(plan) is not None
    steps.begin(plan)
    assert steps.narrowed is None


def test_layers_call_a_hook_that_fits_and_others_in_steps_with_their_rows(pool):
    plain, fits = Heard("plain"), Heard("fits", capturable=True)
    steps = steps_of(pool, plain, fits)
    attend = CalledAttention(lambda layer, q, k, v: q, steps)
    nothing = torch.zeros(1)
    for tags, heard in (((0, 0), 0), ((0, 7), 2)):
        steps.narrow(plan_of(*tags, hooks=2))
        steps.begin(plan_of(*tags, hooks=2), 8)
        attend(0, nothing, nothing, nothing)
        assert steps.end_queued()() == ()
        assert len(plain.layers) == heard
    assert fits.layers == ["began", "ended"] * 2
    assert fits.prompts_at == plain.prompts_at == [8, 8]


def test_a_graph_contains_the_calls_of_those_that_fit(pool):
    plain, fits = Heard("plain"), Heard("fits", capturable=True)
    steps = steps_of(pool, plain, fits)
    steps.narrow(plan_of(7, hooks=2))
    steps.begin(plan_of(7, hooks=2))
    steps.capture()
    steps.attention_began(0, *torch.zeros(3, 1))
    steps.check_captured()
    assert (plain.layers, fits.layers) == ([], ["began"])


def test_a_hook_that_raises_while_a_graph_is_captured_is_refused(pool):
    steps = steps_of(pool, Heard("fits", capturable=True, breaks=True))
    steps.capture()
    steps.attention_began(0, *torch.zeros(3, 1))
    with pytest.raises(HookError, match="fits cannot be used: attention_began failed before"):
        steps.check_captured()


class Strict(SdpaBackend):
    """Attends only in steps that it was told of, as the backends of GPUs do."""

    told = False

    def begin(self, batch):
        self.told = True
        super().begin(batch)

    def attend_ends(self, layer, q, contexts, page_table):
        assert self.told
        return super().attend_ends(layer, q, contexts, page_table)


@pytest.mark.parametrize("beyond", [False, True])
def test_failures_are_told_when_the_device_is_done(pool, beyond, caplog):
    """Rows beside narrowed ones read all their pages, and narrowed ones nobody else's. The next
    step may have begun by then: the hook has not failed there."""
    hook = Choosing("chooses")
    hook.beyond = beyond
    steps, plan = steps_of(pool, hook), plan_of(0, 7)
    site = HookSite(pool, (AttentionSpec(1.0),), decodes=True)
    attend = HookedAttention(Strict, site, steps)
    table = torch.from_numpy(plan.page_table).long()
    steps.narrow(plan)
    steps.begin(plan)
    attend.begin(
        AttentionBatch(
            query_lens=plan.query_lens,
            context_lens=plan.context_lens,
            num_decodes=2,
            page_table=table,
            token_pages=table[:, 3],
            token_offsets=torch.zeros(2, dtype=torch.int64),
        )
    )
    torch.manual_seed(0)
    q, k, v = torch.randn(2, HEADS, SIZE), torch.randn(2, HEADS, SIZE), torch.randn(2, HEADS, SIZE)
    out = attend(0, q, k, v)
    for row, pages in enumerate(([1, 2, 3, 4], [8, 8] if beyond else [5, 8])):
        keys, values = pool.gather(0, pool.places(torch.tensor(pages)))
        seen = (len(pages) - 1) * PAGE + 1
        weights = (q[row, :, None] @ keys[:, :seen].transpose(1, 2)).softmax(-1)
        assert torch.allclose(out[row], (weights @ values[:, :seen])[:, 0], atol=1e-5)
    tell = steps.end_queued()
    assert not caplog.records
    steps.narrow(plan)
    assert [each.point for each in tell()] == ["pages_wanted"] * beyond
    logged = [record.getMessage() for record in caplog.records]
    assert logged == ["hook chooses raised in pages_wanted"] * beyond
    steps.begin(plan)
    assert steps.narrowed is not None
