"""Twenty-four prompts of SmolLM2: at borders of pages, of several chunks, chats, texts that share a
prefix, and texts that are not ASCII."""

from __future__ import annotations

from pathlib import Path

import pytest

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
