"""Several stages on CPUs, one or more ranks each: the tokens of one process by every path; what the
end of a rank does; what is refused."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import GREEDY, build, finish, held, running, submit
from paths_kit import prompt_of
from references import references
from test_profiling import written
from test_ranks import (
    FAMILIES,
    GONE_S,
    SMALL,
    Pair,
    all_gone,
    check,
    pids_of,
    test_log_probabilities_of_prompt_and_output,
    test_preempted,
    test_rank_0_samples_for_all,
    test_whole_in_chunks_from_the_cache_and_resumed,
)
from tiny_families import HYBRIDS
from tiny_models import write_tiny_model
from waiting import wait_until

from baton import LLM
from baton.errors import InvalidRequestError
from engine.bounds import Bounds
from engine.engine import EngineError
from engine.loop.slow_steps import LONG
from engine.model import ModelError
from engine.model.ranks import _even_ends
from engine.pages.blocks import BlockManager
from engine.ranks.steps import decode, encode
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.step.feedback import Feedback
from engine.step.grid import Grid
from engine.step.lanes import Lanes
from engine.step.plan import GroupTable
from engine.types import Mode, Request, StopRules

pytestmark = pytest.mark.timeout(300)
__all__ = [
    "test_log_probabilities_of_prompt_and_output",
    "test_preempted",
    "test_rank_0_samples_for_all",
    "test_whole_in_chunks_from_the_cache_and_resumed",
]
LAYERS = {"layers": 4}
TIED = {**FAMILIES["qwen2"], **LAYERS}
"""The last stage has a head of its own, of the first stage's tensor."""
MODELS = {
    "llama": {**FAMILIES["llama"], **LAYERS},
    "qwen2": TIED,
    "gemma3": {**FAMILIES["gemma3"]},
    "qwen3_moe": {**FAMILIES["qwen3_moe"], **LAYERS},
    "deepseek_v3": FAMILIES["deepseek_v3"],
    "lfm2": FAMILIES["lfm2"],
}
QUICK = ("llama", 2, 1)
"""Its stages have three layers and one, as asked."""
GRIDS = [QUICK, *((model, pp, tp) for model in MODELS for pp, tp in ((2, 1), (2, 2)))]
GRIDS += [("llama", 4, 1), ("llama", 4, 2), ("qwen2", 4, 1)]


def cases() -> list[Any]:
    return [
        pytest.param(
            each,
            id=f"{each[0]}-{each[1]}x{each[2]}",
            marks=() if each == QUICK else pytest.mark.matrix,
        )
        for each in dict.fromkeys(GRIDS)
    ]


@pytest.fixture(scope="module", params=cases())
def pair(request, tmp_path_factory) -> Iterator[Pair]:
    model, pp, tp = request.param
    path = write_tiny_model(tmp_path_factory.mktemp(model), **MODELS[model])
    asked = {"pp_layers": (3, 1)} if request.param == QUICK else {}
    with running(path, **SMALL) as one, running(path, pp=pp, tp=tp, **SMALL, **asked) as several:
        assert not asked or several.pool.num_layers == 1
        yield Pair(one, several, references(path))


def test_a_worker_of_stages_has_the_identity_of_one_process(pair):
    assert pair.one.model == pair.several.model
    assert pair.one.pool.num_layers > pair.several.pool.num_layers


def test_several_steps_are_in_flight_and_all_rows_go_on(pair):
    """Five sequences and a long prompt beside them, on as many tokens as one lane gives."""
    runs = [submit(pair.several, prompt_of(9 + i), 24, ignore_eos=True) for i in range(5)]
    late = submit(pair.several, prompt_of(150), 12, ignore_eos=True)
    finish(*runs, late)
    check(pair.answers, runs, 24)
    check(pair.answers, [late], 12)


def test_streams_that_wait_in_lanes_are_told(pair, caplog):
    """Steps one after the other have other rows; a gap is from a lane's step to its next one."""
    caplog.set_level(logging.WARNING, "baton.engine")
    runs = [submit(pair.several, prompt_of(9 + i), 150, ignore_eos=True) for i in range(4)]
    wait_until(lambda: all(len(run.records[0]) > 20 for run in runs))
    loop = pair.several._loop
    slept_s = max(1.0, 2 * LONG * loop._slow._usual_s)  # Steps of a busy machine take long, too.
    loop.post(lambda _: time.sleep(slept_s))
    finish(*runs)
    told = [vars(one) for one in caplog.records if one.message.startswith("streams waited")]
    long = [one for one in told if one["gap_ms"] >= 1e3 * slept_s]
    assert long
    assert all(one["decodes"] <= 2 for one in long)
    assert max(one.get("commands_ms", 0.0) for one in long) >= 1e3 * slept_s


def test_a_profile_tells_the_wait_for_the_stage_before(pair, tmp_path):
    pair.several.profile(6 + pair.several._loop._scheduler.lanes.flights, tmp_path)
    finish(submit(pair.several, prompt_of(40), 20, ignore_eos=True))
    assert written(tmp_path)["gloo:recv"] >= 6


STEP_S, SETTLE_S = 0.2, 0.15


def sleeping(seconds: float, do: Callable[..., Any]) -> Callable[..., Any]:
    """Takes so much longer."""

    def slowly(*arguments: Any) -> Any:
        done = do(*arguments)
        time.sleep(seconds)
        return done

    return slowly


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "count", "most"), [("prompts", 2, 0.75), ("rows", 8, 0.6),
                                                     ("row", 1, 1.05)])  # fmt: skip
def test_stages_run_different_steps_at_the_same_time(kind, count, most, tmp_path, monkeypatch):
    """Each stage sleeps for a while in each step, and the loop when it settles one. Two stages take
    little more than one: of prompts' chunks one after the other, and of eight rows. A row alone
    waits for both stages, and not for the loop."""
    monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", f"rank.step=sleep:{STEP_S}~1")
    path = write_tiny_model(tmp_path, **LAYERS, tokenizer=False)
    with running(path, pp=2, max_step_tokens=32, max_sequences=8, num_pages=80) as engine:
        finish(submit(engine, prompt_of(20), 4, ignore_eos=True))
        settler, steps = engine._loop._scheduler.settler, engine._loop._executor._own.steps
        settler.settle = sleeping(SETTLE_S, settler.settle)
        steps.forward = sleeping(STEP_S, steps.forward)  # Behind what it waits for.
        before, began_s = engine.load().steps, time.monotonic()
        length, tokens = (160, 1) if kind == "prompts" else (3, 8)
        with held(engine):
            runs = [submit(engine, prompt_of(length + i), tokens, ignore_eos=True)
                    for i in range(count)]  # fmt: skip
        finish(*runs)
        took_s = time.monotonic() - began_s
    number = engine.load().steps - before
    share = took_s / (2 * number * STEP_S)
    print(f"{kind}: {number} steps in {took_s:.2f} s: {share:.2f} of one stage behind the other")
    assert share < most


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"quantization": "fp8"}),
        ("llama", {"kv_cache_dtype": "fp8"}),
        ("qwen3_moe", {"tp": 2, "expert_parallel": True}),
        ("llama", {"kv_bands": 4}),
        ("llama", {"kv_bands": 4, "kv_cache_dtype": "fp8"}),
    ],
    ids=str,
)
def test_stages_compose_with(model, options, tmp_path):
    """Pages of one stage have no bands."""
    path = write_tiny_model(tmp_path, **MODELS[model], tokenizer=False, hidden=128)
    found = []
    for pp in (1, 2):
        own = {**options, "kv_bands": 1} if pp == 1 else options
        with running(path, pp=pp, max_step_tokens=40, num_pages=40, **own) as engine:
            assert bool(engine.pool.bands) == (own.get("kv_bands", 1) > 1)
            runs = [submit(engine, prompt_of(n), 12, ignore_eos=True) for n in (70, 17, 5)]
            finish(*runs)
            found.append([run.tokens for run in runs])
    assert found[0] == found[1]


# -- the end of a rank --------------------------------------------------------------------------


def check_beams_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="beams: need workers of one stage"):
        llm.beam_search("One, two,", width=2, max_tokens=8)
    options = {"max_tokens": 8, "choices": 2, "ignore_eos": True}
    assert llm.generate("One, two,", **options).usage.output_tokens == 16


ENDS = [(2, 1, 1, "kill"), (2, 1, 1, "stop")]
ENDS += [(2, 2, rank, how) for rank in (1, 2, 3) for how in ("kill", "stop")]
ENDS += [(4, 1, rank, how) for rank in (1, 2, 3) for how in ("kill", "hang")]


@pytest.mark.parametrize(
    ("pp", "tp", "rank", "how"),
    [pytest.param(*end, marks=pytest.mark.matrix if at else ()) for at, end in enumerate(ENDS)],
)
def test_a_rank_that_does_not_go_on_is_named_and_none_is_left(
    pp, tp, rank, how, tmp_path, monkeypatch
):
    """While it generates. The user's process goes on. A search with beams was refused before."""
    if how == "hang":
        monkeypatch.setenv("BATON_DEBUG_FAILPOINTS", f"rank.step=hang~{rank}@20")
    path, after_s = write_tiny_model(tmp_path, **LAYERS), 20 if how == "hang" else 2
    why = {
        "kill": f"rank {rank} was killed by SIGKILL",
        "stop": f"no step has ended for {after_s} s: rank {rank} is stopped",
        "hang": f"no step has ended for {after_s} s: rank {rank} is not going on",
    }[how]
    settings = {"device": "cpu", "debug": {"num_pages": 40}, "max_sequences": 4}
    with LLM(path, pp=pp, tp=tp, **settings) as llm:
        pids = pids_of(llm.engine)
        assert len(pids) == pp * tp - 1
        assert llm.engine.pool.num_layers == 4 // pp
        if how != "hang":
            check_beams_are_refused(llm)
        with llm.stream("One, two,", max_tokens=500, ignore_eos=True) as stream:
            next(iter(stream))
            if how != "hang":
                os.kill(pids[rank], signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            llm.engine._step_timeout_s = float(after_s)
            with pytest.raises(EngineError, match=why):
                list(stream)
        wait_until(lambda: all_gone(list(pids.values())), GONE_S)


# -- what is refused ----------------------------------------------------------------------------

REFUSED = {
    "kv_bands 3 does not fit this model: it has 2 layers": {"kv_bands": 3},
    "hooks need kv_bands 1": {"kv_bands": 2, "hooks": ("quest",)},
    "kv_store needs kv_bands 1": {
        "kv_bands": 2,
        "kv_host_bytes": 1 << 20,
        "kv_stores": ("disk:/tmp/kv?gib=1",),
    },
    "kv_bands 2 cannot be set: transformers' own code": {
        "kv_bands": 2,
        "model_impl": "transformers",
    },
    "pp 0 must be at least 1": {"pp": 0},
    "pp 3 does not fit this model: it has 2 layers": {"pp": 3},
    "pp_layers 2,1 must be 2 numbers above 0, one for each stage, whose sum is 2": {
        "pp": 2,
        "pp_layers": (2, 1),
    },
    "pp_layers 2,0 must be 2 numbers above 0": {"pp": 2, "pp_layers": (2, 0)},
    "pp_layers 1,1 must be a number for each of 1 stages": {"pp_layers": (1, 1)},
    "pp 9 times tp 8 must be at most 64 ranks": {"pp": 9, "tp": 8},
    "speculation suffix needs pp 1: the last stage drafts": {"pp": 2, "speculation": "suffix"},
    "speculation mtp needs pp 1, also where nobody decodes": {
        "pp": 2,
        "speculation": "mtp",
        "decodes": False,
    },
    "hooks need pp 1": {"pp": 2, "hooks": ("quest",)},
    "kv_host_gib needs pp 1": {"pp": 2, "kv_host_bytes": 1 << 20},
    "pp 2 cannot be set: transformers' own code": {"pp": 2, "model_impl": "transformers"},
    "tp 3 does not fit this model": {"pp": 2, "tp": 3},
}
MODELS_REFUSED = {
    "each of its layers reads the tokens themselves": FAMILIES["gemma4_shared"],
    "some layers keep states": HYBRIDS["qwen3_5"],
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_stages_cannot_do_is_refused(why, tmp_path, weights_unread):
    path = write_tiny_model(tmp_path, tokenizer=False)
    with pytest.raises((EngineError, ModelError), match=f"^{why}"):
        build(path, **REFUSED[why])


@pytest.mark.parametrize("why", MODELS_REFUSED)
def test_models_that_cannot_have_stages_are_refused(why, tmp_path, weights_unread):
    path = write_tiny_model(tmp_path, **MODELS_REFUSED[why], tokenizer=False)
    with pytest.raises(ModelError, match=f"^pp 2 does not fit this model: {why}"):
        build(path, pp=2)


# -- the shape ----------------------------------------------------------------------------------


def test_rank_0_is_of_the_last_stage():
    grid = Grid(3, 2)
    assert [grid.stage_of(rank) for rank in range(grid.size)] == [2, 2, 1, 1, 0, 0]
    assert [grid.within(rank) for rank in range(grid.size)] == [0, 1] * 3


@pytest.mark.parametrize("seed", range(20))
def test_layers_are_divided_as_evenly_as_can_be(seed):
    """Against all ways to cut."""
    drawn = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 50, (7,), generator=drawn).tolist()

    def largest(ends: list[int]) -> int:
        return max(sum(sizes[first:end]) for first, end in pairwise([0, *ends]))

    assert largest(_even_ends(sizes, 2)) == min(largest([cut, 7]) for cut in range(1, 7))
    ways = [[one, two, 7] for one in range(1, 6) for two in range(one + 1, 7)]
    assert largest(_even_ends(sizes, 3)) == min(map(largest, ways))


def test_a_step_that_only_copies_pages_of_several_groups_reaches_other_ranks():
    scheduler = Scheduler(Bounds(max_context_tokens=64), BlockManager(8), Sampler(2, 9, "cpu", []))
    empty = scheduler.planner._build(np.zeros(0, np.intp), 1, [], [], [])
    nothing, page = np.zeros(0, np.int32), np.array([3], np.int32)
    table = GroupTable(np.zeros((0, 1), np.int32), nothing, page, page + 1)
    other = decode(encode(replace(empty, others=(table,))))
    assert (other.num_tokens, other.others[0].pages.size) == (0, 0)
    assert (other.others[0].copy_source, other.others[0].copy_target) == (3, 4)


class Rows:
    """Slots that decode through so many stages, without a scheduler."""

    def __init__(self, stages: int, *, masked: int = -1) -> None:
        self.lanes = Lanes(stages, 8)
        self.in_flight = np.zeros(8, np.int32)
        self.masked = np.arange(8) == masked
        self.steps: list[list[int]] = []

    def step(self, running: Any, *, early: bool = False) -> list[int]:
        given = self.in_flight, self.masked, len(self.steps)
        return self.launch(self.lanes.choose(np.array(running), *given, early=early))

    def launch(self, rows: Any, decodes: bool = True) -> list[int]:
        if len(rows):
            own = np.array(rows)
            plan: Any = SimpleNamespace(
                number=len(self.steps), sample_slots=own, num_decodes=decodes * own.size
            )
            self.lanes.launched(plan)
            self.in_flight[own] += 1
            self.steps.append(own.tolist())
        return list(map(int, rows))

    def end(self, number: int) -> None:
        self.lanes.over(number)
        self.in_flight[self.steps[number]] -= 1


def test_lanes_share_the_rows_and_merge_again():
    """Each goes on while its last step is still in the last stage. A row that comes later is in no
    step of its own for ever."""
    rows = Rows(2)
    assert rows.step(range(6)) == [0, 1, 2]
    assert rows.step(range(6)) == [3, 4, 5]
    assert rows.step(range(7)) == [0, 1, 2, 6]
    rows.end(0)
    assert rows.step(range(7)) == [3, 4, 5]
    rows.end(1)
    assert rows.step(range(7)) == [0, 1, 2, 6]


def test_a_lane_goes_on_early_where_nothing_else_can():
    """One step ahead of what the host knows, and no further."""
    rows = Rows(4)
    assert rows.step([3]) == [3]
    assert rows.step([3]) == []
    assert rows.step([3], early=True) == [3]
    assert rows.step([3], early=True) == []
    assert rows.step([3, 5]) == [5]
    rows.end(0)
    assert rows.step([3, 5]) == []
    assert rows.step([3, 5], early=True) == [3]


def test_a_row_whose_draw_waits_for_masks_goes_on_when_its_token_is_known():
    rows = Rows(2, masked=1)
    assert [rows.step(range(4)), rows.step(range(4))] == [[0, 1], [2, 3]]
    assert rows.step(range(4), early=True) == [0, 2]
    rows.end(0)
    assert rows.step(range(4)) == [1, 3]


def test_a_chunk_comes_behind_a_step_of_each_lane():
    rows, due = Rows(2), []
    for _ in "ab":
        for decodes in (True, True, False):
            due.append(rows.lanes.prompts_are_due(6))
            rows.launch([len(due)], decodes)
    assert due == [False, False, True] * 2
    assert rows.lanes.prompts_are_due(0)
    assert not Lanes(1, 8).prompts_are_due(0)


def plan_of(number: int, decodes: list[int], drawn: list[int], written: list[int]) -> Any:
    columns = {"row_slots": decodes, "sample_slots": drawn, "write_slots": written}
    return SimpleNamespace(
        number=number,
        num_decodes=len(decodes),
        sample=drawn or None,
        **{name: np.array(slots, np.int32) for name, slots in columns.items()},
    )


def test_the_first_stage_takes_tokens_when_they_are_asked_for_or_have_been_drawn():
    """In their order, and none that is older than what the table has."""
    feedback, nobody = Feedback(2, 8), 8

    def due(number: int, decodes: list[int], written: Any = (), drawn: Any = None) -> Any:
        plan = plan_of(number, decodes, decodes if drawn is None else drawn, list(written))
        return [slots.tolist() for slots in feedback.due(plan)]

    assert due(0, [0, 1]) == []
    assert due(1, [2, 3]) == []
    assert due(2, [0, 1]) == [[0, 1]]
    assert due(3, [], drawn=[4]) == [], "chunks wait for no tokens"
    assert due(4, [], drawn=[]) == [[2, 3]], "step 1 is over"
    assert due(5, [5], written=[5, 1]) == [[0, nobody]], "the host wrote another sequence's token"
    assert due(6, [4, 1]) == [[4]]
    assert due(7, [4]) == [[5], [4, 1]]


@pytest.mark.parametrize(
    ("prompts", "chunks"),
    [
        ([8000], [1344] * 5 + [1280]),
        ([1000], [512, 488]),
        ([8000] * 4, [4096, 3904, 4032, 3968, 2688, 2688, 2624, *[1344] * 5, 1280]),
        ([2500, 2500], [896, 896, 708, 512, 512, 512, 512, 452]),
    ],
)
def test_prompts_that_wait_fill_the_stages(prompts, chunks):
    """Many in chunks as large as a step may be, and the last ones in six for two stages."""
    bounds = Bounds(pp=2, max_step_tokens=4096, full_step_tokens=1, max_context_tokens=9000)
    scheduler = Scheduler(bounds, BlockManager(4000), Sampler(64, 9, "cpu", []))
    for number, length in enumerate(prompts):
        ids = np.full(length, number + 1, np.int32)
        request = Request(bytes([number]), ids, GREEDY, StopRules(1), Mode.WHOLE)
        scheduler.requests.submit(request, lambda _: None, [])
    found = []
    while scheduler.admission.admit() or (plan := scheduler.planner.plan()) is not None:
        found.append(plan.prompt_tokens)
    assert found == chunks
