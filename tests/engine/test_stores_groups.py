"""Whole engines of models with windows, over host tiers and stores that are divided by group."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from engine_kit import finish, running, submit
from test_states import spoil
from test_tiers_engine import talk
from test_tiers_stores import conversations
from tiny_families import EVERY, HYBRIDS
from tiny_models import write_tiny_model
from waiting import wait_until

from engine.beams.params import BeamParams
from engine.tiers.stores.opening import address_of

SMALL = MappingProxyType(
    {
        "num_pages": 41,
        "page_size": 64,
        "max_sequences": 4,
        "max_step_tokens": 256,
        "kv_host_bytes": 1 << 20,
    }
)
COUNT, ROUNDS = 16, 2
MODELS = {
    "gemma3": EVERY["gemma3"],
    "lfm2": EVERY["lfm2"],
    "qwen3_next": HYBRIDS["qwen3_next"],
    "nemotron_h": HYBRIDS["nemotron_h"],
}


@pytest.fixture(
    scope="module",
    params=[
        "gemma3",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("lfm2", "qwen3_next")),
        pytest.param("nemotron_h", marks=pytest.mark.matrix),
    ],
)
def model(request, tmp_path_factory):
    options = {**MODELS[request.param], "max_positions": 1024}
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, **options)


@pytest.fixture(scope="module")
def want(model):
    with running(model, num_pages=400, page_size=64, max_step_tokens=256) as large:
        return talk(large, conversations(COUNT), ROUNDS)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("disk", 1),
        pytest.param("dir", 1, marks=pytest.mark.slow),
        pytest.param("disk", 2, marks=pytest.mark.slow),
        pytest.param("dir", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("no_hurry")
def test_a_resume_point_comes_from_a_store(model, want, tmp_path, kind, ranks):
    """A wrong page of any group makes wrong tokens."""
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length")
    options = {**SMALL, "tp": ranks, "kv_secret_file": str(secret)}
    options["kv_stores"] = (f"{kind}:{tmp_path}/kv?gib=0.2",)
    with running(model, **options) as engine:
        assert len(engine.pools) > 1
        assert talk(engine, conversations(COUNT), ROUNDS) == want
        wait_until(lambda: engine.load().tiers.held_slots == 0)
    with running(model, **options) as again:
        runs = [submit(again, prompt, 5) for prompt in conversations(COUNT)]
        finish(*runs)
        assert [run.tokens[0] for run in runs] == [answers[0] for answers in want]
        assert again.load().tiers.loaded_tokens[kind] >= 256, "objects outlive the worker"


@pytest.mark.parametrize("beams", [None, pytest.param(BeamParams(2), marks=pytest.mark.slow)])
@pytest.mark.usefixtures("no_hurry")
def test_a_wrong_state_in_a_store_is_found_once_by_a_request(tmp_path, beams):
    """The store still has it when the prompt is computed again."""
    options = {**HYBRIDS["qwen3_next"], "max_positions": 1024}
    path = write_tiny_model(tmp_path / "tiny", tokenizer=False, **options)
    with running(path, num_pages=41, page_size=64, max_step_tokens=256) as plain:
        prompts = conversations(20)
        want = [submit(plain, prompt, 5, beams=beams) for prompt in prompts]
        finish(*want)
    options = {**SMALL, "kv_stores": (f"disk:{tmp_path}/kv?gib=0.2",)}
    with running(path, **options) as engine:
        for prompt in prompts:
            finish(submit(engine, prompt, 5))
            spoil(engine)
    with running(path, **options) as again:
        for prompt, wanted in zip(prompts, want, strict=True):
            run = submit(again, prompt, 5, beams=beams)
            finish(run)
            assert run.tokens == wanted.tokens
        load = again.load()
        assert load.tiers.loaded_tokens["disk"] > 0
        assert 0 < load.preemptions <= len(prompts)


@pytest.mark.slow
@pytest.mark.usefixtures("no_hurry")
def test_ranks_copy_the_pages_of_all_groups(model):
    prompts = [prompt[: 20 + 3 * at] for at, prompt in enumerate(conversations(24))]
    with running(model, num_pages=1600) as large:
        want = talk(large, prompts, ROUNDS)
    with running(model, num_pages=41, max_sequences=4, kv_host_bytes=24 << 20, tp=2) as small:
        assert len(small.pools) > 1
        assert talk(small, prompts, ROUNDS) == want
        assert small.load().tiers.loaded_tokens["host"] > 0


@pytest.mark.parametrize(
    ("address", "group", "part"),
    [
        ("disk:/kv?gib=100", "", "disk:/kv?gib=25.0"),
        ("disk:/kv/?gib=100", "window-128", "disk:/kv/window-128?gib=25.0"),
        ("dir:/kv?gib=100", "window-128", "dir:/kv?gib=100"),
        ("mooncake://h:1?gib=4&device=a,b", "w", "mooncake://h:1?gib=1.0&device=a,b"),
        ("mooncake://h:1", "w", "mooncake://h:1"),
        ("disk:/kv?gib=much", "", "disk:/kv?gib=much"),
    ],
)
def test_groups_divide_a_store(address, group, part):
    assert address_of(address, group, 0.25) == part
    assert address_of(address, "", 1.0) == address
