"""A model in this process: what a client of a server would get, and nothing left behind."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from adapters_kit import answers, write_adapter
from engine_kit import check_baseline
from references import generate_reference
from rich.console import Console
from tiny_models import write_tiny_model
from waiting import wait_until

import local.engine_dispatcher
import local.llm
import local.progress
from baton import LLM
from baton.client.generation import FinishReason
from baton.client.options import Message
from baton.errors import (
    BatonError,
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    NotFoundError,
    ServerError,
)
from engine.engine import EngineError
from faults import failpoints
from serving.models.hub import HubError
from serving.settings import SettingsError

TEXTS = ["The quick brown fox", "Zwölf Boxkämpfer jagen", "いろはにほへと 🏃‍♀️"]
CHAT: list[Message] = [{"role": "user", "content": "What is a baton?"}]
IDS = [7, 300, 12, 45, 99, 210]
SETTINGS = {
    "device": "cpu",
    "debug": {"num_pages": 40},
    "max_sequences": 4,
    "served_name": "tiny",
}
"""Room for four sequences of 150 tokens."""
LONG = {"max_tokens": 100, "ignore_eos": True}
SLOW = "engine.step=sleep:0.1"
"""A generation that is to be ended early is LONG and SLOW: it takes 10 s."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def module_llm(tiny: Path) -> Iterator[LLM]:
    with LLM(tiny, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def llm(module_llm: LLM) -> Iterator[LLM]:
    yield module_llm
    check_baseline(module_llm.engine)


@pytest.fixture(scope="module")
def tokenizer(tiny: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def slow() -> Iterator[None]:
    failpoints.arm(SLOW)
    yield
    failpoints.arm("")


def running(llm: LLM) -> int:
    return llm.engine.load().running_sequences


def test_the_package_stays_light_until_somebody_asks_for_it() -> None:
    code = "import sys, baton, baton.client; print({'torch', 'engine', 'router'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
    with pytest.raises(ImportError, match="LMM"):
        from baton import LMM  # noqa: F401


# What it says.


def test_greedy_output_equals_transformers(llm, tiny, tokenizer) -> None:
    turns = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    prompts = [*(tokenizer(text)["input_ids"] for text in TEXTS), turns, IDS]
    wanted = [generate_reference(tiny)(tuple(prompt), 20) for prompt in prompts]
    options = {"max_tokens": 20, "temperature": 0.0}
    many = llm.generate([*TEXTS, CHAT, np.array(IDS, np.int32)], **options)
    alone = [llm.generate(text, **options) for text in TEXTS]
    alone += [llm.chat(CHAT, **options), llm.generate(token_ids=IDS, **options)]
    for generation, again, prompt, want in zip(many, alone, prompts, wanted, strict=True):
        assert list(generation.token_ids) == list(again.token_ids) == want
        assert generation.text == again.text
        assert generation.usage.prompt_tokens == len(prompt)
        assert generation.usage.output_tokens == len(want)
        assert generation.model == "tiny"
        assert generation.timings.time_to_first_token_s > 0


@pytest.mark.parametrize("honoured", [True, False])
def test_a_models_own_sampling_holds_where_a_request_is_silent(
    honoured, llm, tiny, tmp_path
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_k": 1}')
    greedy = llm.generate(TEXTS[0], max_tokens=8, temperature=0).token_ids
    rare = {**SETTINGS["debug"], "generation_config": honoured}
    with LLM(folder, **{**SETTINGS, "debug": rare}) as own:
        found = {own.generate(TEXTS[0], max_tokens=8, seed=seed).token_ids for seed in range(3)}
        assert (found == {greedy}) is honoured
        free = own.generate(TEXTS[0], max_tokens=8, seed=0, top_k=0)
        assert free.token_ids != greedy


def test_a_stream_says_the_same_bit_by_bit(llm) -> None:
    whole = llm.chat(CHAT, max_tokens=20, seed=3)
    with llm.stream(messages=CHAT, max_tokens=20, seed=3) as stream:
        deltas = list(stream)
    assert len(deltas) > 5
    assert "".join(delta.text for delta in deltas) == stream.result.text == whole.text
    assert stream.result.token_ids == whole.token_ids
    assert list(stream) == []


def test_stop_texts_end_the_text_and_are_named(llm) -> None:
    text = llm.generate(TEXTS[0], max_tokens=40, temperature=0.0, ignore_eos=True).text
    stop = text[len(text) // 2 :][:3]
    before = text[: text.index(stop)]
    options = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "stop": ["\0", stop]}
    ended = llm.generate(TEXTS[0], **options)
    assert ended.text == before
    assert ended.finish_reason is FinishReason.STOP
    assert ended.choices[0].stop_sequence == stop
    assert llm.generate(TEXTS[0], include_stop=True, **options).text == before + stop


def test_tokens_are_counted_as_generating_counts_them(llm, tokenizer) -> None:
    assert list(llm.tokenize(TEXTS[2])) == tokenizer(TEXTS[2])["input_ids"]
    turns = llm.tokenize(messages=CHAT)
    assert llm.chat(CHAT, max_tokens=1).usage.prompt_tokens == len(turns)


# Many.


def test_many_more_prompts_than_the_pool_holds(llm, tiny) -> None:
    rng = np.random.default_rng(1)
    prompts = [rng.integers(5, 384, length).tolist() for length in rng.integers(8, 120, 40)]
    steps = llm.engine.load().steps
    found = llm.generate(prompts, max_tokens=16, temperature=0.0, ignore_eos=True)
    assert [len(one.token_ids) for one in found] == [16] * 40
    assert llm.engine.load().steps - steps < 40 * 16, "nothing shared a step"
    for prompt, generation in list(zip(prompts, found, strict=True))[::8]:
        want = generate_reference(tiny)(tuple(prompt), 16)
        assert list(generation.token_ids[: len(want)]) == want


def test_threads_share_it(llm) -> None:
    alone = [llm.generate(text, max_tokens=16, seed=2).text for text in TEXTS]
    with ThreadPoolExecutor(6) as pool:
        work = lambda text: llm.generate(text, max_tokens=16, seed=2).text  # noqa: E731
        assert list(pool.map(work, TEXTS * 2)) == alone * 2


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_alone(llm, monkeypatch, capfd, is_terminal) -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80) if is_terminal else None
    monkeypatch.setattr(local.progress, "terminal", lambda _format: screen)
    llm.generate(TEXTS, max_tokens=4)
    assert screen is None or "3/3" in screen.file.getvalue()
    assert capfd.readouterr() == ("", "")


# What it refuses.


def test_every_broken_rule_is_named(llm) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(TEXTS[0], top_p=3.0, max_tokens=0, choices=5)
    assert [violation.field for violation in caught.value.violations] == [
        "input.sampling.top_p",
        "input.stop.max_tokens",
        "input.choices",
    ]
    assert caught.value.reason == "INVALID_FIELD"


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        ([], {}, ValueError, "exactly one of"),
        (["x"], {"messages": CHAT}, ValueError, "exactly one of"),
        ([["x"]], {"messages": CHAT}, ValueError, "exactly one of"),
        (["x"], {"max_token": 3}, TypeError, "max_token"),
        ([[1, 2, 3]], {}, TypeError, "token_ids"),
        ([CHAT], {}, TypeError, "turns its messages"),
        ([CHAT[0]], {}, TypeError, "turns its messages"),
        ([[b"x"]], {}, TypeError, "bytes"),
        ([b"x"], {}, TypeError, "bytes"),
        ([3], {}, TypeError, "of type int"),
        ([""], {}, InvalidRequestError, "input.text"),
        ([], {"messages": []}, InvalidRequestError, "messages"),
        ([], {"token_ids": [9999]}, InvalidRequestError, "vocabulary"),
        (
            [],
            {"token_ids": [5] * 3000},
            InvalidRequestError,
            "maximum context length is 624 tokens",
        ),
        (
            [],
            {"token_ids": [5] * 30, "max_tokens": 620},
            InvalidRequestError,
            "context length is 624 tokens.*exceed it",
        ),
        (["x"], {"model": "other"}, NotFoundError, "served: tiny"),
    ],
)
def test_bad_input(llm, arguments, options, kind, words) -> None:
    with pytest.raises(kind, match=words):
        llm.generate(*arguments, **options)


def test_a_stream_is_of_one_prompt(llm) -> None:
    with pytest.raises(TypeError, match="one text, and not of type list"):
        llm.stream([TEXTS[0]])


def test_the_first_bad_prompt_of_many_ends_the_others(llm, slow) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([TEXTS[0], IDS, ""], **LONG)
    assert caught.value.__notes__ == ["prompt 2 of 3, counted from 0"]
    wait_until(lambda: running(llm) == 0)


@pytest.mark.parametrize(
    ("model", "settings", "kind", "words"),
    [
        (None, {"max_sequence": 4}, SettingsError, "max_sequences"),
        (None, {"max_model_len": 9}, SettingsError, "vLLM's; here: --max-context-tokens of"),
        (None, {"debug": {"num_pages": -1}}, SettingsError, "num_pages"),
        (None, {"debug": {"num_pages": 1}}, EngineError, "pages"),
        ("/nowhere/at/all", {}, HubError, "nowhere"),
    ],
)
def test_bad_settings(tiny, model, settings, kind, words) -> None:
    with pytest.raises(kind, match=words):
        LLM(model or tiny, **{**SETTINGS, **settings})


def test_settings_come_from_the_environment_too(tiny, monkeypatch) -> None:
    monkeypatch.setenv("BATON_MODEL", str(tiny))
    monkeypatch.setenv("BATON_ROLE", "prefill")
    monkeypatch.setenv("BATON_MAX_SEQUENCES", "3")
    monkeypatch.setenv("BATON_DEBUG_NUM_PAGES", "999")
    with LLM(debug={"num_pages": 20}, device="cpu") as llm:
        assert llm.engine.load().max_sequences == 3
        assert llm.engine.load().total_pages == 19
        assert len(llm.generate("x", max_tokens=2, ignore_eos=True).token_ids) == 2


# How it ends early.


def test_leaving_a_stream_ends_it(llm, slow) -> None:
    with llm.stream(TEXTS[0], **LONG) as stream:
        next(stream)
        assert running(llm) == 1
    wait_until(lambda: running(llm) == 0)
    with pytest.raises(CancelledError):
        list(stream)


def test_a_stream_that_nobody_can_read_any_more_is_ended(llm, slow) -> None:
    stream = llm.stream(TEXTS[0], **LONG)
    next(stream)
    del stream
    wait_until(lambda: running(llm) == 0)


def test_a_stream_that_was_never_read_can_be_closed(llm, slow) -> None:
    stream = llm.stream(TEXTS[0], **LONG)
    stream.close()
    with pytest.raises(CancelledError):
        list(stream)


def test_a_bound_on_time_is_kept(llm, slow) -> None:
    with pytest.raises(DeadlineError):
        llm.generate([TEXTS[0]] * 3, timeout_s=0.05, **LONG)
    with (
        pytest.raises(DeadlineError),
        llm.stream(TEXTS[0], timeout_s=0.05, **LONG) as stream,
    ):
        list(stream)
    wait_until(lambda: running(llm) == 0)


def test_ctrl_c_leaves_nothing_running(llm, slow) -> None:
    # A loop of an earlier test may have left its own handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        wait_until(lambda: running(llm) == 4)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([TEXTS[0]] * 20, **LONG)
        interrupted.result()
    wait_until(lambda: running(llm) == 0)
    assert llm.engine.load().waiting_requests == 0


def test_closing_ends_what_runs_and_gives_the_memory_back(tiny, slow) -> None:
    before = set(threading.enumerate())
    llm = LLM(tiny, **SETTINGS)
    stream = llm.stream(TEXTS[0], **LONG)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(llm.generate, [TEXTS[1]] * 9, **LONG)
        wait_until(lambda: running(llm) == 4)
        llm.close()
        llm.close()
        with pytest.raises(CancelledError):
            calling.result(30)
    wait_until(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(CancelledError):
        list(stream)
    for use in (llm.generate, llm.stream, llm.tokenize):
        with pytest.raises(RuntimeError, match="closed"):
            use("x")
    pages = weakref.ref(llm.engine.pool.data)
    llm = stream = calling = use = None
    gc.collect()
    assert pages() is None


def test_a_fork_cannot_use_it_and_ends_nothing_of_it(llm) -> None:
    """Nor waits for its threads, which it has not."""
    forks = multiprocessing.get_context("fork")
    said = forks.SimpleQueue()

    def use() -> None:
        with pytest.raises(RuntimeError, match="forked") as caught:
            llm.generate("x")
        said.put(str(caught.value))

    child = forks.Process(target=use)
    child.start()
    child.join(30)
    is_stuck = child.is_alive()
    child.kill()
    assert not is_stuck
    assert child.exitcode == 0
    assert "process that made it" in said.get()
    assert llm.generate("x", max_tokens=2, ignore_eos=True).usage.output_tokens == 2


@pytest.mark.parametrize("thread", ["step", "device", "loop"])
def test_one_that_its_own_threads_find_dropped_is_closed(tiny, thread) -> None:
    """By a garbage collection, which may be on any."""
    before = set(threading.enumerate())
    dropped = LLM(tiny, **SETTINGS)
    dropped.generate("x", max_tokens=1)
    circle = [dropped]
    circle.append(circle)
    steps, calls = dropped.engine._loop, dropped._loop._loop
    collect = {
        "step": partial(steps.post, lambda _: gc.collect()),
        "device": partial(steps._executor._stream.submit, gc.collect),
        "loop": partial(calls.call_soon_threadsafe, gc.collect),
    }[thread]
    gc.disable()
    try:
        steps = calls = dropped = circle = None
        collect()
        wait_until(lambda: set(threading.enumerate()) <= before)
    finally:
        gc.enable()


def test_one_that_is_dropped_is_closed(tiny) -> None:
    """But not before its streams."""
    before = set(threading.enumerate())
    stream = LLM(tiny, **SETTINGS).stream(TEXTS[0], max_tokens=4, ignore_eos=True)
    assert sum(len(delta.token_ids) for delta in stream) == 4
    del stream
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_ctrl_c_at_a_script_shows_nothing_but_itself(tiny) -> None:
    """It has closed neither the model nor a stream."""
    script = f"""
import os, signal, threading
from baton import LLM
from faults import failpoints
failpoints.arm({SLOW!r})
llm = LLM({str(tiny)!r}, **{SETTINGS})
stream = llm.stream("x", **{LONG})
next(stream)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
llm.generate(["x"] * 9, **{LONG})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    said = [line for line in done.stderr.splitlines() if "failpoint" not in line.lower()]
    assert said[0] == "Traceback (most recent call last):"
    assert said[-1] == "KeyboardInterrupt"
    assert done.stderr.count("Traceback") == 1


# What goes wrong inside.


@pytest.mark.parametrize("choices", [1, 3])
def test_a_model_that_computes_nan_says_so(tiny, choices) -> None:
    with LLM(tiny, **SETTINGS) as llm:
        with torch.inference_mode():
            llm.engine._loop._executor.steps.model.layers[0].before_mixer.weight.fill_(float("nan"))
        with pytest.raises(ServerError, match="NaN"):
            llm.generate("x", choices=choices)
        check_baseline(llm.engine)


def test_a_bug_is_named_as_the_cause(llm, monkeypatch) -> None:
    monkeypatch.setattr(local.engine_dispatcher, "request_of", lambda _: 1 / 0)
    with pytest.raises(ServerError) as caught:
        llm.generate("x")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_profile_is_written_where_one_is_asked_for(tiny, tmp_path) -> None:
    debug = {"num_pages": 40, "profile": 2, "profile_dir": tmp_path}
    with LLM(tiny, **{**SETTINGS, "debug": debug}) as llm:
        llm.generate("x", max_tokens=5, ignore_eos=True)
        wait_until(lambda: list(tmp_path.iterdir()))


@pytest.mark.parametrize("failed", ["device", "loop"])
def test_what_runs_no_steps_any_more_ends_everything(tiny, slow, failed) -> None:
    with LLM(tiny, **SETTINGS) as llm, llm.stream(TEXTS[0], **LONG) as stream:
        next(stream)
        loop = llm.engine._loop
        if failed == "loop":
            loop._turn = None
        else:
            loop.post(lambda _: loop._on_lost())
        with pytest.raises(ServerError):
            list(stream)
        with pytest.raises(BatonError):
            llm.generate("x")


@pytest.mark.model
def test_the_demo_model_is_there_by_default(demo_model: Path) -> None:
    with LLM(device="cpu", debug={"num_pages": 64}) as llm:
        answer = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0.0,
        )
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason is FinishReason.END_OF_SEQUENCE


def test_forms_and_tools(llm: LLM) -> None:
    """As over a server: `test_e2e_structure` has them all."""
    wild = {"temperature": 1.5, "seed": 3, "max_tokens": 40}
    two = llm.generate(["a", "b"], regex="[a-f]{3}[0-9]", **wild)
    assert all(one.text[:3].isalpha() and one.text[3:].isdigit() for one in two)
    assert llm.generate(TEXTS[0], choice=["yes", "no"], choices=2, **wild).text in ("yes", "no")
    with pytest.raises(InvalidRequestError, match="/not"):
        llm.generate("a", json_schema={"not": {}}, strict=True)
    with pytest.raises(InvalidRequestError, match="leave no token"):
        llm.generate("a", regex="[a-f]{3}", allowed_token_ids=[1], **wild)
    with pytest.raises(InvalidRequestError, match="chat template"):
        llm.generate(messages=CHAT, tools=[{"name": "f"}])


def test_adapters_by_name(tiny, tmp_path) -> None:
    folder = write_adapter(tiny, tmp_path / "law")
    with LLM(tiny, **SETTINGS, adapters=(f"law={folder}",)) as llm:
        found = llm.generate(token_ids=IDS, model="law", max_tokens=8, temperature=0.0)
        assert list(found.token_ids) == answers(tiny, folder)(IDS, 8).tokens
        assert found.model == "law"
        with pytest.raises(NotFoundError):
            llm.generate(token_ids=IDS, model="poems", max_tokens=1)
