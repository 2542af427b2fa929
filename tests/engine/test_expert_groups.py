"""Workers that hold the experts together: the tokens of one worker, alone and side by side; who may
join."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_kit import build, check_baseline, finish, running, submit
from expert_groups_kit import grouped, member
from paths_kit import prompt_of
from references import references
from test_ranks import (
    FAMILIES,
    SAMPLED,
    SMALL,
    Pair,
    check,
    test_log_probabilities_of_prompt_and_output,
    test_preempted,
    test_rank_0_samples_for_all,
    test_whole_in_chunks_from_the_cache_and_resumed,
)
from tiny_families import HYBRIDS
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.config import EngineConfig
from engine.engine import Engine, EngineError
from engine.expert_groups.leader import GRACE_S, GroupError, Leader
from engine.expert_groups.member import Member
from engine.model import ModelError
from engine.parts.building import build_executor
from engine.parts.defaults import with_defaults
from engine.step.collective import CollectiveError
from engine.step.executor import Executor

pytestmark = pytest.mark.timeout(300)
__all__ = [
    "test_log_probabilities_of_prompt_and_output",
    "test_preempted",
    "test_rank_0_samples_for_all",
    "test_whole_in_chunks_from_the_cache_and_resumed",
]
GROUPS = [("glm4_moe", 2), ("qwen3_moe", 4), ("gpt_oss", 2), ("deepseek_v3", 2), ("mixtral", 2)]
GROUPS += [("gemma4_experts", 2), ("lfm2_moe", 2)]


def cases() -> list[Any]:
    return [
        pytest.param(each, id="{}-{}".format(*each), marks=pytest.mark.matrix if at else ())
        for at, each in enumerate(GROUPS)
    ]


@pytest.fixture(scope="module", params=cases())
def group(request, tmp_path_factory) -> Iterator[tuple[Path, list[Engine]]]:
    family, count = request.param
    folder = tmp_path_factory.mktemp(family)
    path = write_tiny_model(folder / "model", **FAMILIES[family])
    with grouped(path, folder / "group", count, **SMALL) as engines:
        yield path, engines
        for engine in engines:
            check_baseline(engine)


@pytest.fixture(scope="module", params=[pytest.param("alone", marks=pytest.mark.matrix)])
def pair(group) -> Iterator[Pair]:
    """One worker by itself, and one of the group, whose others have nothing to do. `make test` has
    the group at once instead."""
    path, engines = group
    with running(path, **SMALL) as one:
        yield Pair(one, engines[-1], references(path))


def test_all_workers_run_at_once(group):
    """Prompts, rows and those with nothing to do, in any mixture; a drawn row is that of one, and
    so is the identity."""
    path, engines = group
    lengths = (3, 150, 17, 40, 64, 90)
    runs = [
        submit(engines[at % len(engines)], prompt_of(length), 6 + 5 * at, ignore_eos=True)
        for at, length in enumerate(lengths)
    ]
    with running(path, **SMALL) as one:
        drawn = [submit(engine, prompt_of(37), 12, sampling=SAMPLED) for engine in (*engines, one)]
        finish(*runs, *drawn)
        for engine in engines:
            assert engine.model == one.model
            assert engine.pool.num_kv_heads == one.pool.num_kv_heads
    for at, run in enumerate(runs):
        check(references(path), [run], 6 + 5 * at)
    assert len({tuple(run.tokens[0]) for run in drawn}) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["qwen3_5_moe", "nemotron_h_experts"])
def test_models_that_keep_states(family, tmp_path):
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **HYBRIDS[family])
    options = {"num_pages": 60, "max_sequences": 4, "max_step_tokens": 96}
    with grouped(path, tmp_path / "group", 2, **options) as engines:
        runs = [submit(e, prompt_of(n), 8, ignore_eos=True) for e in engines for n in (5, 150)]
        finish(*runs)
        for run in runs:
            references(path, whole=True).check(run, 8)


def test_nobody_serves_before_all_have_finished_their_weights(tmp_path, monkeypatch):
    """A step of one runs the experts of all."""
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **FAMILIES["mixtral"])
    done: list[str] = []

    def slow(config: EngineConfig, *others: Any) -> Executor:
        late = config.expert_group.endswith("rank=1&ranks=2")
        made = build_executor(config, *others)
        time.sleep(0.5 * late)
        done.append("finished")
        return made

    def worker(rank: int) -> Engine:
        made = build(path, expert_group=f"{tmp_path}/group?rank={rank}&ranks=2")
        done.append("serves")
        return made

    monkeypatch.setattr("engine.engine.build_executor", slow)
    with ThreadPoolExecutor(2) as threads:
        engines = list(threads.map(worker, range(2)))
    for engine in engines:
        engine.stop()
    assert done == ["finished", "finished", "serves", "serves"]


# -- who may join -------------------------------------------------------------------------------


def test_who_does_not_fit_is_told_and_the_group_forms_without_it(tmp_path):
    leader, members = Leader(tmp_path, 2), [member(tmp_path, 0)]
    with pytest.raises(GroupError, match="another worker is rank 0 of the expert group"):
        Leader(tmp_path, 2)
    wait_until(lambda: leader._members)
    for other, why in (
        (member(tmp_path, 0), "another worker is rank 0"),
        (member(tmp_path, 2), "rank 2 is none of the 2 of the expert group"),
        (member(tmp_path, 1, dtype="float16"), "dtype of rank 1 differs from that of other"),
    ):
        with pytest.raises(CollectiveError, match=why):
            other.meet()
    members.append(member(tmp_path, 1))
    assert members[0].meet() == members[1].meet()
    with ThreadPoolExecutor(2) as threads:
        told = [threads.submit(each.loaded, f"weights {at}") for at, each in enumerate(members)]
        for each in told:
            with pytest.raises(CollectiveError, match="has read other weights"):
                each.result(5)
    for each in members:
        each.close()
    leader.close()


@pytest.mark.parametrize("kind", ["open", "link"])
def test_a_folder_that_others_could_reach_is_refused(tmp_path, kind):
    folder = tmp_path / "group"
    if kind == "open":
        folder.mkdir()
        folder.chmod(0o750)
    else:
        folder.symlink_to(tmp_path)
    with pytest.raises(GroupError, match="must be a folder of this user's own, with mode 0700"):
        Leader(folder, 2)
    assert not (folder / "lock").exists()


def test_a_group_that_does_not_form_says_so_and_who_is_late(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("engine.expert_groups.member.FORM_S", 0.6)
    monkeypatch.setattr("engine.expert_groups.member.TOLD_S", 0.1)
    nobody, late = "rank 0 has not come to .* within", "has waited 1 s for ranks 1, 3 to come to"
    for leader, own, why in ((None, 1, nobody), (4, 0, late)):
        leads = Leader(tmp_path, leader) if leader else None
        others = [member(tmp_path, rank) for rank in (2,) if leads]
        with pytest.raises(CollectiveError, match=why):
            member(tmp_path, own).meet()
        if leads is not None:
            assert "the expert group waits for ranks 1, 3 to come to" in caplog.text
            leads.close()
        for other in others:
            other.close()


def test_a_step_waits_for_those_whose_step_runs_or_has_just_ended(tmp_path):
    """So two busy workers run together, though each asks while its last step runs, and an idle one
    delays the other once."""
    ran: list[str] = []
    leader = Leader(tmp_path, 2)
    members = [
        Member({"rank": rank}, tmp_path, lambda _, rank=rank: ran.append(f"idle {rank}"))
        for rank in range(2)
    ]
    for each in members:
        each.start()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda each: each.meet(), members))
        assert members[0].take([7]) == {0: [7]}
        members[0].done()
        wait_until(lambda: ran == ["idle 1"])
        for ask in range(3):
            other = threads.submit(members[1].take, [ask])
            with pytest.raises(TimeoutError):
                other.result(20 * GRACE_S)
            assert members[0].take([9]) == other.result(5) == {0: [9], 1: [ask]}
            for each in members:
                each.done()
            members[1].ended()
        assert ran == ["idle 1"]
        for _ in range(4):
            members[0].ended()
        assert threads.submit(members[1].take, [5]).result(5) == {1: [5]}
        members[1].done()
        wait_until(lambda: ran == ["idle 1", "idle 0"])
    for each in members:
        each.close()
    leader.close()


REFUSED = {
    "expert_group here must be FOLDER": ("mixtral", {"expert_group": "here"}),
    "expert_group: 1 ranks must be 2 to 64": ("mixtral", {"expert_group": "g?rank=0&ranks=1"}),
    "expert_group: .* has more than 100 bytes": (
        "mixtral",
        {"expert_group": f"{'g' * 101}?rank=0&ranks=2"},
    ),
    "expert_group: rank 2 must be below ranks 2": ("mixtral", {"expert_group": "g?rank=2&ranks=2"}),
    "expert_group needs tp 1 and pp 1: its workers": (
        "mixtral",
        {"tp": 2, "expert_parallel": True},
    ),
    "expert_group needs tp 1 and pp 1": ("mixtral", {"pp": 2}),
    "expert_parallel and expert_group cannot be set: transformers' own code runs this model": (
        "qwen3_moe",
        {"model_impl": "transformers"},
    ),
    "speculation mtp cannot be set with expert_group": ("mixtral", {"speculation": "mtp"}),
    "expert_group is for models with experts, and this one has none": ("llama", {}),
    "expert_group with 3 ranks does not fit this model: it does not divide 4 experts; these fit: 1,"
    " 2, 4$": ("mixtral", {"expert_group": "g?rank=0&ranks=3"}),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_in_a_group_is_refused(why, tmp_path, monkeypatch, weights_unread):
    monkeypatch.chdir(tmp_path)
    family, options = REFUSED[why]
    path = write_tiny_model(tmp_path, tokenizer=False, **FAMILIES[family])
    with pytest.raises((EngineError, ModelError), match=f"^{why}"):
        build(path, **{"expert_group": "g?rank=0&ranks=2"} | options)


REFUSED_ON_GPUS = {
    "expert_group: rank 2 has GPU 2, and 2 can be seen here": {"expert_group": "g?rank=2&ranks=4"},
    "hooks need expert_group on CPUs": {"hooks": ("quest",)},
    "speculation suffix needs expert_group on CPUs": {"speculation": "suffix"},
}


@pytest.mark.parametrize("why", REFUSED_ON_GPUS)
def test_what_a_group_on_gpus_cannot_have_is_refused(why, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    path = write_tiny_model(tmp_path, tokenizer=False, **FAMILIES["mixtral"])
    options = {"expert_group": "g?rank=0&ranks=2"} | REFUSED_ON_GPUS[why]
    with pytest.raises(EngineError, match=f"^{why}"):
        build(path, device="cuda", **options)


def test_each_worker_of_a_group_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = EngineConfig(model="none", expert_group="g?rank=1&ranks=2")
    for seen, device, want in (
        (2, "auto", "cuda:1"),
        (1, "cuda", "cuda"),
        (4, "cuda:3", "cuda:3"),
    ):
        monkeypatch.setattr("torch.cuda.device_count", lambda seen=seen: seen)
        assert with_defaults(replace(config, device=device)).device == want
