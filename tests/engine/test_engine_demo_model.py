"""SmolLM2, greedy, float32: 24 prompts equal transformers, token for token, by every path. `make
test` takes a third of them, and leaves the crowds to a tiny model (`test_engine_paths.py`).

A token may differ only where the two best logits of transformers are closer than the noise of
float32 sums; every such place is printed, and a difference anywhere else fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_kit import Run, build, check_baseline, finish, hand_off, held, submit
from references import NOISE, Reference, first_difference
from references import references as answers

from engine.engine import Engine
from engine.types import EndReason

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MAX_TOKENS = 14
THIRD = [pytest.param(3, id="a third"), pytest.param(1, id="all", marks=pytest.mark.slow)]
"""Of the prompts every so many."""
BOUNDARIES = (15, 16, 17, 63, 64, 65)
SEVERAL_CHUNKS = (120, 530, 700)
PROSE = (
    "The lighthouse stood at the end of a long pier, and every evening the keeper climbed its"
    " two hundred steps to light the lamp. Ships passed in the dark, each with a crew that never"
    " learned his name. One winter the sea froze, and people walked out to see him. "
)
SHARED_PREFIX = PROSE + "Here is a question about the story. "
QUESTIONS = (
    "Who climbed the steps?",
    "How many steps were there?",
    "What happened one winter?",
    "How many steps were there, and why?",
)
CHATS = (
    "What is the capital of France?",
    "Answer with one word: is water wet?",
    "Name three colours.",
    "Grüße auf Deutsch, bitte! 🥖",
    "What is 2 + 2?",
)
NOT_ASCII = (
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "いろはにほへと ちりぬるを わかよたれそ",
    "🏃‍♀️🏃 baton 🥖",
    "В чащах юга жил бы цитрус? Да, но",
    "Le cœur déçu mais l'âme plutôt naïve,",
    "1, 2, 3 → α, β, γ →",
)


@pytest.fixture(scope="module")
def prompts(demo_model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prose = tokenizer(PROSE * 20)["input_ids"]
    # Each begins elsewhere in the text: these share no prefix with each other.
    found = [prose[n : n + n_tokens] for n, n_tokens in enumerate(BOUNDARIES + SEVERAL_CHUNKS, 1)]
    found += [tokenizer(SHARED_PREFIX + question)["input_ids"] for question in QUESTIONS]
    found += [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": chat}], add_generation_prompt=True, return_dict=False
        )
        for chat in CHATS
    ]
    found += [tokenizer(text)["input_ids"] for text in NOT_ASCII]
    assert len(found) == 24
    assert [len(prompt) for prompt in found[:9]] == [*BOUNDARIES, *SEVERAL_CHUNKS]
    return found


@pytest.fixture(scope="module")
def references(demo_model: Path, prompts: list[list[int]]) -> list[Reference]:
    """Greedy output up to and with end of sequence."""
    answer = answers(demo_model)
    found = [answer(prompt, MAX_TOKENS) for prompt in prompts]
    assert any(len(reference.tokens) < MAX_TOKENS for reference in found), "none ends by itself"
    assert any(len(reference.tokens) == MAX_TOKENS for reference in found)
    return found


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[Engine]:
    """Chunks of 512 tokens."""
    with running(demo_model, num_pages=500, max_sequences=24, max_step_tokens=512) as engine:
        yield engine


@pytest.fixture
def small_chunks(demo_model: Path) -> Iterator[Engine]:
    """Chunks of 32 tokens: at most 16 sequences, whose decode rows share the step's budget."""
    with running(demo_model, num_pages=500, max_sequences=16, max_step_tokens=32) as engine:
        yield engine


@contextmanager
def running(path: Path, **options: int) -> Iterator[Engine]:
    engine = build(path, **options)
    try:
        yield engine
        check_baseline(engine)
    finally:
        engine.stop()


def check(runs: Sequence[Run], references: Sequence[Reference], eos: frozenset[int]) -> None:
    ties = 0
    for number, (run, reference) in enumerate(zip(runs, references, strict=True)):
        (tokens,) = run.tokens
        if tokens != reference.tokens:
            at = first_difference(tokens, reference.tokens)
            assert at < len(reference.tokens), f"prompt {number}: goes on after its end"
            assert reference.margins[at] < NOISE, f"prompt {number}: token {at} differs"
            ties += 1
            continue
        ended = tokens[-1] in eos
        reason = EndReason.END_OF_SEQUENCE if ended else EndReason.LENGTH
        assert run.ends[0].reason is reason
        assert ended or len(tokens) == MAX_TOKENS
    closest = min(margin for reference in references for margin in reference.margins)
    print(f"\n{ties} of {len(runs)} outputs left at a tie; the closest margin is {closest:.1e}")


def run_all(engine: Engine, prompts: Sequence[list[int]], at_once: int) -> list[Run]:
    runs: list[Run] = []
    for start in range(0, len(prompts), at_once):
        group = [submit(engine, p, MAX_TOKENS) for p in prompts[start : start + at_once]]
        finish(*group, timeout_s=120)
        runs += group
    return runs


def eos_of(engine: Engine) -> frozenset[int]:
    return frozenset(engine.model.eos_token_ids)


@pytest.mark.parametrize("every", THIRD)
def test_whole_then_from_the_prefix_cache(engine, prompts, references, every):
    """In chunks of 512, every third prompt alone; then again, all but the last tokens cached."""
    prompts, references = prompts[::every], references[::every]
    alone = set(range(0, len(prompts), 3))
    for chosen, at_once in ((alone, 1), (set(range(len(prompts))) - alone, 8)):
        runs = run_all(engine, [prompts[i] for i in sorted(chosen)], at_once)
        check(runs, [references[i] for i in sorted(chosen)], eos_of(engine))
    before = engine.load().prompt_tokens_cached
    check(run_all(engine, prompts, at_once=24), references, eos_of(engine))
    complete = sum((len(prompt) - 1) // 16 * 16 for prompt in prompts)
    assert engine.load().prompt_tokens_cached - before == complete


@pytest.mark.slow
def test_sixteen_at_once(demo_model, prompts, references):
    """Nothing cached: prompts of every length and decoding rows meet in the same steps."""
    options = {"num_pages": 500, "max_sequences": 16, "max_step_tokens": 512, "prefix_cache": False}
    with running(demo_model, **options) as engine:
        runs = [submit(engine, prompt, MAX_TOKENS) for prompt in prompts]
        finish(*runs, timeout_s=120)
        check(runs, references, eos_of(engine))
        assert engine.load().prompt_tokens_cached == 0


@pytest.mark.parametrize("every", THIRD)
def test_in_small_chunks_then_handed_off(engine, small_chunks, prompts, references, every):
    """Chunks of 32 tokens, then pages over to the other engine, eight requests in the air."""
    prompts, references = prompts[::every], references[::every]
    check(run_all(small_chunks, prompts, at_once=16), references, eos_of(engine))

    def across(prompt: list[int]) -> Run:
        return hand_off(small_chunks, engine, prompt, MAX_TOKENS)

    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(across, prompts))
    check(runs, references, eos_of(engine))


@pytest.mark.slow
def test_preempted_and_resumed(demo_model, prompts, references):
    """A pool of a third of the need. Pages of 4 tokens, so that short outputs outgrow what
    admission keeps back for them."""
    chosen = [i for i, prompt in enumerate(prompts) if len(prompt) < 100]
    need = sum(-(-(len(prompts[i]) + MAX_TOKENS) // 4) for i in chosen)
    options = {"num_pages": need // 3 + 1, "page_size": 4, "max_sequences": 24}
    with running(demo_model, max_step_tokens=64, **options) as engine:
        with held(engine):
            runs = [submit(engine, prompts[i], MAX_TOKENS) for i in chosen]
        finish(*runs, timeout_s=120)
        assert engine.load().preemptions > 0
        assert engine.load().preemptions == sum(run.ends[0].preemptions for run in runs)
        check(runs, [references[i] for i in chosen], eos_of(engine))
