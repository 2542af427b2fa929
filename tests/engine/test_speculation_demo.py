"""SmolLM2 with the suffix drafter, on answers that repeat their prompts: equal text, and more than
three of ten drafts are right."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import finish, hand_off, running, submit
from speculation_kit import speculating
from tokenizers import Tokenizer

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

CODE = """def total(prices, tax):
    result = 0
    for price in prices:
        result = result + price
    result = result + result * tax
    return result


def mean(values):
    result = 0
    for value in values:
        result = result + value
    return result / len(values)
"""
PROSE = (
    "The lighthouse stood at the end of a long pier, and every evening the keeper climbed its two"
    " hundred steps to light the lamp. Ships passed in the dark, each with a crew that never"
    " learned his name. One winter the sea froze, and people walked out to see him."
)
TASKS = {
    "code": f"Rewrite this code with the name `result` changed to `sum`:\n```python\n{CODE}```",
    "copy": f"Repeat this code without any change:\n```python\n{CODE}```",
    "edit": f"Correct the spelling of this text and write it out again:\n{PROSE}",
}


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_edits_and_code_are_the_same_text_through_prefill_and_decode(
    demo_model: Path, tokenizer: Tokenizer, task: str
) -> None:
    turns = f"<|im_start|>user\n{TASKS[task]}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(turns).ids
    with running(demo_model) as prefill:
        alone = submit(prefill, prompt, 80)
        finish(alone)
        with speculating(demo_model) as decode:
            run = hand_off(prefill, decode, prompt, 80)
            load = decode.load().speculation
    assert tokenizer.decode(run.tokens[0]) == tokenizer.decode(alone.tokens[0])
    rate = load.accepted_tokens / load.drafted_tokens
    print(f"{task}: {load.accepted_tokens} of {load.drafted_tokens} drafts, {rate:.2f}")
    print(f"{len(run.tokens[0])} tokens in {sum(load.steps_by_width.values())} steps")
    assert rate > 0.3
