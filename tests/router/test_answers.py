"""The parts of answers: each family's own words, cut at every letter, give the same message."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from frontdoor_kit import write_tokenizer

from router.answers.calls import joined_calls
from router.answers.families import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM_45,
    GLM_47,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN_CODER,
    form_of,
)
from router.answers.forms import ResponseForm, Thought, thought_of
from router.answers.parser import AnswerParser
from router.requests.tokenization import Tokenizer

QWEN = form_of({}, "<tool_call> </tool_call> <think> </think>")
LLAMA_3 = form_of({}, "{%- if x %}<|python_tag|>{%- endif %}")
MISTRAL_7B = form_of({}, "[TOOL_CALLS] [TOOL_RESULTS]")
MISTRAL_SMALL = form_of({}, "[TOOL_CALLS] [ARGS] [THINK] [/THINK]")
OWN: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}
"""A response template that a checkpoint brings: parameters as XML, without JSON."""
CODER = form_of({"response_template": OWN}, "<tool_call> <function=")
V3 = form_of({}, "</think> <｜tool▁calls▁begin｜> ```json")
V31 = form_of({}, "</think> <｜tool▁calls▁begin｜>")
GLM = form_of({}, "</think> <tool_call> <arg_key> </arg_key>\n<arg_value>")
GLM_TIGHT = form_of({}, "</think> <tool_call> <arg_key> </arg_key><arg_value>")
QWEN_3 = form_of({}, "<tool_call> <function= <parameter=")
GPT_OSS = form_of({}, "<|start|>assistant<|channel|>final<|message|>")
SHIPPED_JSON = form_of(
    {
        "response_template": {
            "start_anchor": "<|im_start|>assistant",
            "fields": {
                "content": {},
                "tool_calls": {
                    "open": "<tool_call>",
                    "close": "</tool_call>",
                    "repeats": True,
                    "content": "json",
                    "transform": {"type": "function", "function": "{content}"},
                },
            },
        }
    },
    "<tool_call>",
)


class Message(NamedTuple):
    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    complete: int = 0


CASES: dict[str, tuple[ResponseForm, str, Message]] = {
    "qwen": (
        QWEN,
        '<think>\nhm <b> </think>\n\nLet me see. \n<tool_call>\n{"name": "f", "arguments": '
        '{"a": "x}\\"", "b": [1, {"c": 2}]}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {}, "name": "g"}\n</tool_call>\n',
        Message(
            "Let me see. \n",
            "hm <b>",
            (("f", '{"a": "x}\\"", "b": [1, {"c": 2}]}'), ("g", "{}")),
            2,
        ),
    ),
    "no part": (QWEN, " plain <t answer\n ", Message(" plain <t answer\n ")),
    "no call": (
        QWEN,
        "a <tool_call>oops</tool_call> and more",
        Message("a <tool_call>oops</tool_call> and more"),
    ),
    "broken head": (
        QWEN,
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        Message('<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ),
    "cut in the head": (
        QWEN,
        '<tool_call>{"name": "f", "argu',
        Message('<tool_call>{"name": "f", "argu'),
    ),
    "cut in the arguments": (
        QWEN,
        '<tool_call>{"name": "f", "arguments": {"a": "b c',
        Message("", calls=(("f", '{"a": "b c'),)),
    ),
    "arguments as a text": (
        QWEN,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Message("", calls=(("f", '{"a": 1}'),), complete=1),
    ),
    "no arguments": (
        QWEN,
        '<tool_call>{"name": "f"}</tool_call>',
        Message("", calls=(("f", "{}"),), complete=1),
    ),
    "text behind": (
        QWEN,
        '<tool_call>{"name": "f", "arguments": {"ü": "🎉"}}</tool_call>\nDone.',
        Message("\nDone.", calls=(("f", '{"ü": "🎉"}'),), complete=1),
    ),
    "llama": (
        LLAMA_3,
        '{"name": "f", "parameters": {"q": "a"}}; {"name": "g", "parameters": {}}',
        Message("", calls=(("f", '{"q": "a"}'), ("g", "{}")), complete=2),
    ),
    "llama's tag": (
        LLAMA_3,
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"q": [null, 1.5e3]}}',
        Message("", calls=(("f", '{"q": [null, 1.5e3]}'),), complete=1),
    ),
    "an object that is no call": (LLAMA_3, '{"answer": 42}', Message('{"answer": 42}')),
    "text before an object": (LLAMA_3, 'So {"name": "f"}', Message('So {"name": "f"}')),
    "mistral": (
        MISTRAL_7B,
        '[TOOL_CALLS][{"name": "f", "arguments": {"q": "]"}}, {"name": "g", "arguments": {}}]',
        Message("", calls=(("f", '{"q": "]"}'), ("g", "{}")), complete=2),
    ),
    "mistral, no call": (MISTRAL_7B, "sure [TOOL_CALLS]x", Message("sure [TOOL_CALLS]x")),
    "mistral, named": (
        MISTRAL_SMALL,
        '[THINK]so[/THINK][TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"b": 2} ',
        Message("", "so", (("f", '{"a": 1}'), ("g", '{"b": 2}')), 2),
    ),
    "a checkpoint's own": (
        CODER,
        "<think>t</think>a\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n"
        "<parameter=s>\nx\n</parameter>\n</function>\n</tool_call>b",
        Message("a\nb", "t", (("f", '{"n": 3, "s": "x"}'),), 1),
    ),
    "a checkpoint's own JSON": (
        SHIPPED_JSON,
        '<tool_call>{"name": "f", "arguments": {"a":  1}}</tool_call>',
        Message("", calls=(("f", '{"a":  1}'),), complete=1),
    ),
    "deepseek": (
        V3,
        "<think>so</think>Let me.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        '<｜tool▁sep｜>f\n```json\n{"a": "`x` ```"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Message("Let me.\n\n", "so", (("f", '{"a": "`x` ```"}'), ("g", "{}")), 2),
    ),
    "deepseek 3.1": (
        V31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
        'f<｜tool▁sep｜>{"a": [1, {}]}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        Message("", "", (("f", '{"a": [1, {}]}'), ("g", "{}")), 2),
    ),
    "deepseek, no call": (
        V31,
        "a <｜tool▁calls▁begin｜>b<｜tool▁calls▁end｜>",
        Message("a <｜tool▁calls▁begin｜>b<｜tool▁calls▁end｜>"),
    ),
    "glm": (
        GLM,
        "<think>t</think>\nYes. \n<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
        '<arg_key>s</arg_key>\n<arg_value>a "b"\n<c></arg_value>\n</tool_call>\n'
        "<tool_call>g\n</tool_call>",
        Message("Yes. \n", "t", (("f", '{"n": 3, "s": "a \\"b\\"\\n<c>"}'), ("g", "{}")), 2),
    ),
    "glm 4.7": (
        GLM_TIGHT,
        "<tool_call>f<arg_key>o</arg_key><arg_value>[1, null]</arg_value><arg_key>u</arg_key>"
        "<arg_value>ü</arg_value></tool_call><tool_call>g</tool_call>",
        Message("", "", (("f", '{"o": [1, null], "u": "ü"}'), ("g", "{}")), 2),
    ),
    "glm, no call": (
        GLM,
        "a <tool_call>so it is</tool_call>",
        Message("a <tool_call>so it is</tool_call>"),
    ),
    "qwen 3 coder": (
        QWEN_3,
        "On it.\n<tool_call>\n<function=f>\n<parameter=s>\n x\n\ny\n</parameter>\n<parameter=b>\n"
        "True\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
        "</tool_call>",
        Message("On it.\n", "", (("f", '{"s": " x\\n\\ny", "b": true}'), ("g", "{}")), 2),
    ),
    "qwen 3 coder, no call": (
        QWEN_3,
        '<tool_call>\n{"name": "f"}</tool_call>',
        Message('<tool_call>\n{"name": "f"}</tool_call>'),
    ),
    "harmony": (
        GPT_OSS,
        "<|channel|>analysis<|message|>hm <|<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look. <|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        Message("I look. ", "hm <|", (("f", '{"a": 1}'),), 1),
    ),
    "harmony, the recipient first": (
        GPT_OSS,
        " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        Message("", "", (("f", "{}"),), 1),
    ),
    "harmony, an answer": (
        GPT_OSS,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b\n",
        Message("b\n", "a"),
    ),
    "harmony, a call without tools": (
        GPT_OSS.without_calls(),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=python "
        "code<|message|>1 + 1<|call|>",
        Message("1 + 1", "a"),
    ),
    "harmony, no header": (GPT_OSS, 'total: {"a": 1}', Message('total: {"a": 1}')),
}
TEXT_OR_MORE = {"n": {"type": "integer"}, "s": {"type": "string"}, "u": {"enum": ["ü"]}}
TOOLS = [("f", json.dumps({"properties": TEXT_OR_MORE})), ("g", "")]


def read(
    form: ResponseForm, pieces: Iterable[str], *, thinks: bool = False, is_cut: bool = False
) -> Message:
    parser = AnswerParser(form, thinks=thinks, tools=TOOLS)
    parts = [*map(parser.push, pieces), parser.finish(is_cut=is_cut)]
    calls = joined_calls(call for one in parts for call in one.calls)
    assert len({call.id for call in calls}) == len(calls) == parser.calls_begun
    return Message(
        "".join(one.content for one in parts),
        "".join(one.reasoning for one in parts),
        tuple((call.name, call.arguments) for call in calls),
        parser.calls_complete,
    )


@pytest.mark.parametrize("name", CASES)
def test_the_parts_do_not_depend_on_the_cuts(name: str) -> None:
    form, text, message = CASES[name]
    assert read(form, [text]) == message
    assert read(form, text) == message
    for cut in range(1, len(text)):
        assert read(form, [text[:cut], text[cut:]]) == message


WORDS = (
    'f g { } "name" : "f" "arguments" {"a": 1} ` ```json <tool_call> </tool_call> <think> </think> '
    "<arg_key> </arg_key> <arg_value> </arg_value> <function= > <parameter= </parameter> [ ] , | é "
    "</function> to=functions. analysis commentary < \\ s n 3 null"
)


@pytest.mark.parametrize("name", CASES)
def test_nonsense_is_read_alike_in_any_pieces(name: str) -> None:
    form = CASES[name][0]
    pick = random.Random(name)
    words = (*WORDS.split(" "), *form.markers, " ", "\n")
    for _ in range(30):
        text = "".join(pick.choice(words) for _ in range(pick.randrange(1, 14)))
        for is_cut in (False, True):
            whole = read(form, [text], is_cut=is_cut)
            assert read(form, text, is_cut=is_cut) == whole, text


@pytest.mark.parametrize(
    "name",
    ["arguments as a text", "llama", "llama's tag", "mistral", "mistral, named", "no arguments",
     "a checkpoint's own", "a checkpoint's own JSON", "deepseek", "deepseek 3.1", "glm", "glm 4.7",
     "qwen 3 coder", "harmony", "harmony, the recipient first"],
)  # fmt: skip
def test_a_call_that_is_cut_off_leaks_nowhere(name: str) -> None:
    """Wherever the tokens end: what is certain is a call, and nothing of it is content."""
    form, text, whole = CASES[name]
    begun = []
    for cut in range(len(text) + 1):
        got = read(form, [text[:cut]], is_cut=True)
        assert whole.content.startswith(got.content)
        assert all(call in text for call in got.content.split())
        begun.append(len(got.calls))
        for call, (called, arguments) in zip(got.calls, whole.calls, strict=False):
            assert call[0] == called
            assert arguments.startswith(call[1])
    assert begun == sorted(begun)
    assert begun[-1] == len(whole.calls)


def test_an_object_that_is_cut_off_and_is_no_call() -> None:
    for text in ('{"answer": 4', '{"name": "Ann", "ag', "So {", "sure <tool_call>oops"):
        form = QWEN if "<" in text else LLAMA_3
        assert read(form, [text], is_cut=True) == Message(text)


def test_a_prompt_that_has_begun_the_thinking() -> None:
    assert read(QWEN, ["\nhm</think>\n\nyes"], thinks=True) == Message("yes", "hm")
    assert read(QWEN, ["never ends"], thinks=True) == Message("", "never ends")
    assert thought_of(QWEN, "<|im_start|>assistant\n<think>\n") == Thought(is_open=True)
    assert thought_of(QWEN, "<|im_start|>assistant\n<think>\n\n</think>\n\n") == Thought()
    assert thought_of(QWEN, "<think>a</think>b\nassistant\n") == Thought(may_begin=True)
    assert thought_of(QWEN, "assistant\n<think>so", continues=True) == Thought(is_open=True)
    assert thought_of(LLAMA_3, "<think>") == Thought()


def test_a_broken_response_template_is_not_used(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for spec in ({"fields": {"content": {"open_pattern": "("}}}, {"fields": {"a": 3}}, {"x": 1}):
        config |= {"response_template": spec, "chat_template": "<tool_call>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.load(str(tmp_path))
        assert tokenizer is not None
        assert tokenizer.form.calls is HERMES
        assert AnswerParser(tokenizer.form).push("a").content == "a"


def test_a_call_is_given_as_soon_as_it_is_certain() -> None:
    parser = AnswerParser(QWEN)
    assert not parser.push('<tool_call>\n{"name": "get_weather", "arguments": ').calls
    (first,) = parser.push('{"ci').calls
    assert (first.index, first.name, first.arguments) == (0, "get_weather", '{"ci')
    assert first.id.startswith("call_")
    (more,) = parser.push('ty": "Pa').calls
    assert (more.id, more.name, more.arguments) == ("", "", 'ty": "Pa')
    assert not parser.calls_complete
    (last,) = parser.push('ris"}}\n</tool').calls
    assert last.arguments == 'ris"}'
    assert parser.calls_complete == 1


def test_whose_words_decide_the_form() -> None:
    assert QWEN.calls is HERMES
    assert LLAMA_3.calls is LLAMA
    assert MISTRAL_7B.calls is MISTRAL
    assert MISTRAL_SMALL.calls is MISTRAL_NAMED
    assert CODER.calls is QWEN_3.calls is QWEN_CODER
    assert (V3.calls, V31.calls) == (DEEPSEEK_V3, DEEPSEEK_V31)
    assert (GLM.calls, GLM_TIGHT.calls, GPT_OSS) == (GLM_45, GLM_47, HARMONY)
    assert form_of({}, None) == form_of({}, "{{ messages }}") == ResponseForm()
    assert form_of({}, "<think></think>").without_calls().thinking is not None
    assert LLAMA_3.without_calls() == ResponseForm()
    nine = AnswerParser(MISTRAL_7B).push('[TOOL_CALLS][{"name": "f", "arguments": {').calls
    assert len(nine[0].id) == 9, "its chat template refuses other ids"


def test_arguments_are_never_written_anew() -> None:
    arguments = '{"a":1.50,\t"b" : "\\u00e9",  "c":1e2}'
    text = f'<tool_call>{{"name":"f","arguments":{arguments}}}</tool_call>'
    assert read(QWEN, text).calls == (("f", arguments),)
    assert json.loads(arguments)
