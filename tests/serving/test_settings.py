"""Flags beat the environment, the environment beats the file, the file beats the defaults."""

import math
import tomllib
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError
from settings_kit import settings_of

from console.commands.config import to_toml
from console.settings_options import unknown_variables
from engine.bounds import UNBOUNDED
from local.opening import local_config
from router.settings import RouterSettings
from serving.settings import (
    DEBUG,
    SettingsError,
    debug_settings,
    fields,
    moved_to_debug,
    resolve,
)
from worker.engine_config import engine_config
from worker.settings import Role, WorkerSettings

MOST_SETTINGS = 30
"""Of a process, outside of `debug` and of `LATER`. More than one reads nobody reads."""
LATER = {
    "speculation": "drafts",
    "draft_tokens": "drafts",
    "model_impl": "models through transformers' code",
    "adapters": "LoRA",
    "adapters_dir": "LoRA",
    "pp": "stages",
    "expert_parallel": "expert parallelism",
    "nodes": "several hosts",
    "node": "several hosts",
    "leader": "where hosts meet",
    "fabric": "where hosts meet",
    "expert_group": "expert parallelism",
    "flexible": "roles that change",
    "balance": "roles that change",
    "fast_listen": "the fast door",
}
"""Settings of features since 0.2, two each at most; what else they need is in `debug`."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import os

    for name in os.environ:
        if name.startswith("BATON_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_each_source_beats_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Path("baton.toml").write_text(
        "[worker]\nthreads = 1\nmax_sequences = 2\ndrain_s = 7\n[router]\nname = 'r'\n"
    )
    monkeypatch.setenv("BATON_THREADS", "3")
    monkeypatch.setenv("BATON_MAX_SEQUENCES", "4")
    settings, sources, _ = resolve(WorkerSettings, "worker", {"threads": 5, "dtype": None})
    assert (settings.threads, settings.max_sequences, settings.drain_s) == (5, 4, 7)
    assert settings.dtype == "auto"
    assert {name: sources[name] for name in ("threads", "max_sequences", "drain_s")} == {
        "threads": "flag",
        "max_sequences": "BATON_MAX_SEQUENCES",
        "drain_s": "baton.toml",
    }
    assert sources["dtype"] == "default"


def test_the_file_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("[worker]\nthreads = 1\n")
    second.write_text("[worker]\nthreads = 2\n")
    monkeypatch.setenv("BATON_CONFIG", str(first))
    assert resolve(WorkerSettings, "worker", {}).settings.threads == 1
    assert resolve(WorkerSettings, "worker", {}, second).settings.threads == 2


def test_lists_come_with_commas_or_as_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ROUTERS", "a:1, b:2")
    assert resolve(WorkerSettings, "worker", {}).settings.routers == ("a:1", "b:2")
    flags = {"routers": ["c:3", "d:4,e:5"]}
    assert resolve(WorkerSettings, "worker", flags).settings.routers == ("c:3", "d:4", "e:5")


def test_what_few_need_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("baton.toml").write_text(
        "[worker]\nthreads = 1\n[worker.debug]\nnum_pages = 7\neviction = 'lru'\n"
    )
    monkeypatch.setenv("BATON_DEBUG_EVICTION", "lfu")
    settings, sources, _ = resolve(WorkerSettings, "worker", {"debug": {"step_timeout_s": 5}})
    debug = settings.debug
    assert (debug.num_pages, debug.eviction, debug.step_timeout_s) == (7, "lfu", 5)
    assert sources["debug.num_pages"] == "baton.toml"
    assert sources["debug.eviction"] == "BATON_DEBUG_EVICTION"
    assert (sources["debug.step_timeout_s"], sources["debug.profile"]) == ("flag", "default")


@pytest.mark.parametrize("kind", [WorkerSettings, RouterSettings])
def test_a_process_has_few_settings_and_old_names_are_among_the_rare_ones(
    kind: type[WorkerSettings | RouterSettings],
) -> None:
    assert len(kind.model_fields.keys() - {DEBUG, *LATER}) <= MOST_SETTINGS
    assert max(Counter(LATER.values()).values()) <= 2
    assert moved_to_debug(kind) <= debug_settings(kind).model_fields.keys()
    assert not moved_to_debug(kind) & kind.model_fields.keys()


def test_an_old_name_is_taken_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("baton.toml").write_text(
        "[worker]\nmax_step_tokens = 64\ntransport = 'null'\nlog_level = 'error'\n"
        "[worker.debug]\ntransport = 'loopback'\n"
    )
    monkeypatch.setenv("BATON_LOG_LEVEL", "debug")
    monkeypatch.setenv("BATON_PAGE_SIZE_TOKENS", "32")
    settings, sources, warnings = resolve(WorkerSettings, "worker", {"page_size_tokens": 64})
    debug = settings.debug
    assert (debug.max_step_tokens, debug.log_level, debug.page_size_tokens) == (64, "debug", 64)
    assert debug.transport == "loopback", "the new name beats the old one"
    assert sources["debug.page_size_tokens"] == "flag"
    assert sources["debug.log_level"] == "BATON_LOG_LEVEL"
    end = "the old name goes with 0.4.0"
    assert list(warnings) == [
        "BATON_LOG_LEVEL moved: set BATON_DEBUG_LOG_LEVEL, or `log_level` in [worker.debug];"
        f" {end}",
        "baton.toml: max_step_tokens moved: set BATON_DEBUG_MAX_STEP_TOKENS, or `max_step_tokens`"
        f" in [worker.debug]; {end}",
        "--page-size-tokens moved: set BATON_DEBUG_PAGE_SIZE_TOKENS, or `page_size_tokens` in"
        f" [worker.debug]; {end}",
        f"baton.toml: transport moved: set BATON_DEBUG_TRANSPORT, or `transport` in [worker.debug];"
        f" {end}",
    ]
    assert list(unknown_variables({"BATON_LOG_LEVEL": "", "BATON_TLS_CERT": ""})) == []


def test_a_variable_is_read_in_any_case_and_no_other_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("baton_threads", "3")
    monkeypatch.setenv("BATON_DEBUG", "1")
    assert resolve(WorkerSettings, "worker", {}).settings.threads == 3


def test_defaults_follow_the_role() -> None:
    prefill = resolve(WorkerSettings, "worker", {"role": "prefill"}).settings
    decode = resolve(WorkerSettings, "worker", {"role": Role.DECODE}).settings
    assert prefill.name.startswith("prefill-")
    assert prefill.admin != decode.admin


def test_settings_are_frozen() -> None:
    settings = resolve(WorkerSettings, "worker", {}).settings
    with pytest.raises(ValidationError):
        settings.threads = 1


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"device": "tpu"}, "`device`"),
        ({"routers": ["nowhere"]}, "HOST:PORT"),
        ({"listen": "host:70000"}, "`listen`: must be HOST:PORT"),
        ({"listen": "http://host:80"}, "`listen`: must be HOST:PORT"),
        ({"listen": "::1:80"}, "`listen`: must be HOST:PORT"),
        ({"listen": "[here]:80"}, "`listen`: must be HOST:PORT"),
        ({"listen": "0.0.0.0:0"}, "^worker: listen 0.0.0.0:0 is open to other machines"),
        ({"fabric": "10.0.0.0/8"}, "`fabric`: must be trusted:CIDR or encrypted:CIDR"),
        ({"advertise": "10.0.0.5"}, "`advertise`: must be HOST:PORT"),
        ({"drain_s": math.inf}, "`drain_s`: Input should be a finite number"),
        ({"threads": 99_999}, "`threads`"),
        ({"debug": {"max_step_tokens": 10**11}}, "`debug.max_step_tokens`"),
        ({"max_step_tokens": 16, "page_size_tokens": 32}, "at least debug.page_size_tokens"),
        ({"role": "cook", "seed": -1}, "`seed`"),
        ({"transport": "nccl", "tp": 2}, "nccl cannot serve several ranks"),
        ({"device": "cuda:1", "tp": 2}, "names one GPU for several ranks"),
    ],
)
def test_wrong_values_are_named(flags: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        resolve(WorkerSettings, "worker", flags)


@pytest.mark.parametrize(
    ("endpoint", "is_sound"),
    [
        ("", True),
        ("collector:4317", True),
        ("http://127.0.0.1:4317", True),
        ("http://[::1]:4317/", True),
        ("https://spans.example.com", True),
        ("nonsense", False),
        ("http://collector", False),
        ("http://collector:0", False),
        ("collector:70000", False),
        ("grpc://collector:4317", False),
        ("://collector:4317", False),
        ("http://collector:4318/v1/traces", False),
        ("http://user:word@collector:4317", False),
        (" collector:4317", False),
    ],
)
@pytest.mark.parametrize(
    ("kind", "table"), [(WorkerSettings, "worker"), (RouterSettings, "router")]
)
def test_where_spans_go_is_an_address(
    kind: type[WorkerSettings | RouterSettings], table: str, endpoint: str, is_sound: bool
) -> None:
    flags = {"otlp_endpoint": endpoint}
    if is_sound:
        assert resolve(kind, table, flags).settings.otlp_endpoint == endpoint
    else:
        with pytest.raises(SettingsError, match="`otlp_endpoint`: must be http://HOST:PORT"):
            resolve(kind, table, flags)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[worker]\nvigour = 1\n", "no setting `vigour`$"),
        ("[worker]\nnum_pages = 1\n", "no setting `num_pages`.*in the table `debug`"),
        ("[worker]\ndebug = 1\n", "`debug` must be a table"),
        ("[worker.debug]\nnum_page = 1\n", r"`debug.num_page` \(did you mean `debug.num_pages`"),
        (
            "[worker]\nmax_sequence = 1\n",
            r"no setting `max_sequence` \(did you mean `max_sequences`",
        ),
        ("[wroker]\nseed = 1\n", "`wroker` is neither"),
        ("seed = 1\n", "`seed` is neither"),
        ("worker = 1\n", "must be a table"),
        ("[worker", "not TOML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=complaint):
        resolve(WorkerSettings, "worker", {}, path)
    with pytest.raises(SettingsError, match="cannot read"):
        resolve(WorkerSettings, "worker", {}, tmp_path / "missing.toml")


@pytest.mark.parametrize(
    ("table", "kind"), [("worker", WorkerSettings), ("router", RouterSettings)]
)
def test_what_config_prints_is_a_settings_file(table: str, kind: type, tmp_path: Path) -> None:
    printed = to_toml(table, resolve(kind, table, {}))
    assert tomllib.loads(printed)[table]
    path = tmp_path / "printed.toml"
    path.write_text(printed)
    assert resolve(kind, table, {}, path).settings == resolve(kind, table, {}).settings


def test_every_setting_says_what_it_is() -> None:
    for kind, most in ((WorkerSettings, 43), (RouterSettings, 35)):
        described = fields(kind)
        usual = [name for name in described if not name.startswith(f"{DEBUG}.")]
        assert len(usual) <= most, "what few need is in the table `debug`"
        assert all(field.description for field in described.values())


def test_an_operator_may_choose_every_policy_that_there_is() -> None:
    from engine.pages.eviction import EVICTION_POLICIES
    from engine.schedule.policies import POLICIES

    for setting, known in (("scheduling", POLICIES), ("debug.eviction", EVICTION_POLICIES)):
        assert get_args(fields(WorkerSettings)[setting].annotation) == tuple(known)
    chosen = engine_config(settings_of(WorkerSettings, scheduling="fair", eviction="lfu"))
    assert (chosen.scheduling, chosen.eviction) == ("fair", "lfu")


@pytest.mark.parametrize(
    ("role", "gpu", "given", "mixed", "local"),
    [
        ("both", True, {}, 192, UNBOUNDED),
        ("both", True, {"page_size_tokens": 256}, 256, UNBOUNDED),
        ("both", True, {"mixed_prefill_tokens": 640}, 640, 640),
        ("both", True, {"device": "cpu"}, UNBOUNDED, UNBOUNDED),
        ("both", True, {"pp": 2}, UNBOUNDED, UNBOUNDED),
        ("both", False, {}, UNBOUNDED, UNBOUNDED),
        ("decode", False, {}, 192, UNBOUNDED),
        ("prefill", True, {}, UNBOUNDED, UNBOUNDED),
    ],
)
def test_rows_wait_for_small_chunks_of_prompts(monkeypatch, role, gpu, given, mixed, local):
    """With several rows, of a worker that serves. One that does both has chunks where they
    share steps that have graphs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    settings = settings_of(WorkerSettings, role=role, **given)
    assert engine_config(settings).mixed_prefill_tokens == mixed
    assert local_config(settings).mixed_prefill_tokens == local
