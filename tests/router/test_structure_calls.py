"""Calls that a grammar of a family's form allows are read back, and are what the schemas allow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tiny_tokenizers import SPECIAL, file_of
from tokenizers import Tokenizer

from router.answers.calls import joined_calls
from router.answers.families import FAMILIES, HARMONY, QWEN_CODER, form_of
from router.answers.forms import CallForm, ResponseForm, Thought
from router.answers.parser import AnswerParser
from router.structure.grammar import CallRules, Grammar
from router.structure.rules import Tool
from router.structure.schema import SchemaError

SCHEMA: dict[str, Any] = {
    "$defs": {"few": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "s": {"type": "string", "maxLength": 3},
        "k": {"enum": ["a b", "<c>"]},
        "o": {"$ref": "#/$defs/few"},
        "z": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "null"}]},
    },
    "required": ["n", "s"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"f": SCHEMA, "g": NOTHING}
WORDS = tuple(
    dict.fromkeys(
        (*SPECIAL, *HARMONY.markers, *(word for _, family in FAMILIES for word in family.inner))
    )
)
FORMS = {" ".join(words): form_of({}, " ".join(words)) for words, _ in FAMILIES} | {
    "harmony": HARMONY
}


def tools(*, strict: bool = True, **schemas: dict[str, Any]) -> list[Tool]:
    given = enumerate((schemas or TOOLS).items())
    return [Tool(i, name, json.loads(json.dumps(one)), strict) for i, (name, one) in given]


def drawn(grammar: Grammar, seed: int) -> str:
    """A random text that the grammar allows."""
    rng, tokenizer = np.random.default_rng(seed), Tokenizer.from_str(file_of("bytes", WORDS))
    size = tokenizer.get_vocab_size()
    matcher = LLMatcher(LLTokenizer(file_of("bytes", WORDS), size, [2]), grammar.text())
    ids: list[int] = []
    while not matcher.is_stopped() and len(ids) < 400:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:size])
        ids.append(int(rng.choice(allowed)))
        assert matcher.consume_token(ids[-1])
    assert matcher.is_stopped()
    return tokenizer.decode([one for one in ids if one != 2], skip_special_tokens=False)


def calls_of(form: ResponseForm, pieces: Sequence[str]) -> tuple[list[tuple[str, Any]], str]:
    parser = AnswerParser(form, tools=[(name, json.dumps(one)) for name, one in TOOLS.items()])
    parts = [*map(parser.push, pieces), parser.finish()]
    calls = joined_calls(call for one in parts for call in one.calls)
    assert parser.calls_begun == parser.calls_complete
    content = "".join(one.content for one in parts)
    return [(one.name, json.loads(one.arguments)) for one in calls], content


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("several", [False, True])
def test_what_a_grammar_allows_is_read_back(name: str, several: bool) -> None:
    form = FORMS[name]
    assert form.calls is not None
    seen = set()
    for seed in range(6):
        grammar = Grammar({word: index for index, word in enumerate(WORDS)}, form.lead)
        grammar.calls(form.calls, CallRules(tools(), required=True, several=several))
        text = drawn(grammar, seed)
        calls, content = calls_of(form, list(text))
        assert calls == calls_of(form, [text])[0]
        assert calls
        assert not content, text
        if not several or form.calls.ends_answer:
            assert len(calls) == 1
        for called, arguments in calls:
            jsonschema.validate(arguments, TOOLS[called])
            seen.add(called)
    assert seen == {"f", "g"}


def test_harmony_writes_forms_and_thoughts_into_its_channels() -> None:
    grammar = Grammar({word: index for index, word in enumerate(WORDS)}, HARMONY.lead)
    assert HARMONY.thinking is not None
    grammar.thinking(HARMONY.thinking, Thought(may_begin=True))
    grammar._has_form = True
    grammar._form('"yes"')
    matcher = LLMatcher(LLTokenizer(file_of("bytes", WORDS)), grammar.text())
    thoughts = "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
    for text, is_whole in {
        "<|channel|>final<|message|>yes": True,
        f"{thoughts}<|channel|>final<|message|>yes": True,
        "<|channel|>final<|message|>no": False,
        "yes": False,
    }.items():
        ids = Tokenizer.from_str(file_of("bytes", WORDS)).encode(text, add_special_tokens=False).ids
        one = matcher.deep_copy()
        assert (one.try_consume_tokens(ids) == len(ids) and one.is_accepting()) is is_whole, text


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "/properties/a/pattern"),
        (
            {"properties": {"a/b": {"type": "string", "minLength": -1}}},
            "/properties/a~1b/minLength",
        ),
        ({"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}, "/anyOf"),
        ({"properties": {"a": {"type": "array", "contains": {}}}}, "/contains"),
    ],
)
def test_between_tags_a_strict_schema_is_enforced_or_refused(
    schema: dict[str, Any], pointer: str
) -> None:
    with pytest.raises(SchemaError, match=pointer):
        written(QWEN_CODER, tools(f=schema))
    loose = written(QWEN_CODER, tools(strict=False, f=schema))
    assert any(pointer in one for one in loose.dropped)


def written(form: CallForm, given: list[Tool]) -> Grammar:
    grammar = Grammar({})
    grammar.calls(form, CallRules(given, required=True, several=False))
    return grammar


def test_between_tags_a_tool_without_a_schema_takes_anything() -> None:
    grammar = written(QWEN_CODER, tools(strict=False, f={}))
    matcher = LLMatcher(LLTokenizer(file_of("bytes", WORDS)), grammar.text())
    text = "<tool_call>\n<function=f>\n<parameter=x>\n<b>\n</parameter>\n</function>\n</tool_call>"
    ids = Tokenizer.from_str(file_of("bytes", WORDS)).encode(text, add_special_tokens=False).ids
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()
    assert calls_of(form_of({}, "<tool_call> <function="), [text])[0] == [("f", {"x": "<b>"})]
