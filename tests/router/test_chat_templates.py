"""What chat templates get and may call is what transformers gives them. The templates here have the
mechanisms of well-known models' and none of their words."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import known_templates
import pytest
from tiny_tokenizers import write_folder

from router.doors.openai.turns import ChatRequest
from router.requests.chat_template import ChatTemplateError
from router.requests.tokenization import Tokenizer

USER = {"role": "user", "content": "é <&>"}
CALLS = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "f", "arguments": '{"é":[1, 2]}'},
            },
            {"id": "c2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "5"},
]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]
TOOLS = [
    {
        "function": {
            "strict": True,
            "name": "f",
            "parameters": {"type": "object", "required": ["é"], "properties": {"é": {}}},
        },
        "type": "function",
    },
    {"type": "function", "function": {"name": "g"}},
]
EACH = "{% for m in messages %}"
CALL = EACH + "{% for c in m.tool_calls or [] %}"
END = "{% endfor %}"

SAME = {
    "text of arguments": (
        CALL + "{{ c['function']['name'] + '\\n```json\\n' + c['function']['arguments'] + '\\n' }}"
        "{{ c.function.arguments ~ '!' }}{{ c.function.arguments }}" + END + END,
        CALLS,
    ),
    "no content": (
        EACH + "{{ m.content is none }}{{ m.content is defined }}{{ m['content'] }}"
        "{{ 'content' in m }}{{ m.tool_calls is defined and m.tool_calls is not none }}" + END,
        CALLS,
    ),
    "names": (EACH + "{{ m.name }}|{{ m.tool_call_id }}" + END, [{**USER, "name": "ann"}, *CALLS]),
    "thinking": (EACH + "{{ m.thinking }}|{{ m.reasoning_content }}" + END, CALLS),
    "parts": (
        EACH + "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content | selectattr('type', 'equalto', 'text') %}[{{ p.text }}]"
        "{% endfor %}{% endif %}" + END,
        PARTS,
    ),
    "parts in a macro": (
        "{% macro shown(content) %}{% for p in content %}{{ p['text'] }};{% endfor %}{% endmacro %}"
        + EACH + "{{ shown(m.content) }}" + END,
        PARTS,
    ),
    "options of tojson": (
        EACH + "{{ m.content | tojson(ensure_ascii=True) }}{{ m.content | tojson(true) }}"
        "{{ m | tojson(indent=2, sort_keys=True) }}" + END
        + "{{ {'b': 1, 'a': [1]} | tojson(separators=(',', ':')) }}",
        [USER],
    ),
    "tools as sent": (
        "{% for t in tools %}{{ t | tojson }}{{ t.function.description is defined }}"
        "{% for k in t.function %}{{ k }}{% endfor %}{% endfor %}",
        [USER],
    ),
    "the day": ("{{ strftime_now(format='%Y-%m-%d') }}{{ strftime_now('%B') }}", [USER]),
    "namespace": (
        "{% set ns = namespace(last=-1, found=false) %}" + EACH
        + "{% if m.role == 'tool' %}{% set ns.last = loop.index0 %}{% break %}{% endif %}" + END
        + "{{ ns.last }}{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}",
        CALLS,
    ),
    "methods of texts": (
        EACH + "{{ (m.content or 'a</think>\\n\\nb').split('</think>')[-1].lstrip('\\n') }}"
        "{{ (m.content or '').startswith('é') }}{{ m.role.upper() }}{{ dict(a=1) | tojson }}" + END,
        CALLS,
    ),
    "a variable": ("{{ depth | default('none') }}{{ bos_token }}", [USER]),
}  # fmt: skip
"""Template and messages that both render alike."""
AS_OBJECT = {
    "items": CALL + "{% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}" + END
    + "{{ c.function.arguments['é'] }}" + END + END,
    "tojson": CALL + "{{ c.function.arguments | tojson }}{{ c | tojson }}" + END + END,
    "either": CALL + "{{ c.function.arguments if c.function.arguments is string else"
    " c.function.arguments | tojson }}{{ c.function.arguments is mapping }}" + END + END,
}  # fmt: skip
"""Templates that want the arguments of calls as objects."""


def ours(folder: Path, messages: list[Any], **options: Any) -> str:
    asked = ChatRequest.model_validate_json(json.dumps({"messages": messages, **options}))
    tokenizer = Tokenizer.load(str(folder))
    assert tokenizer is not None
    return tokenizer.render_chat(asked.chat())


def theirs(folder: Path, messages: list[Any], **options: Any) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    begins = not options.get("continue_final_message")
    return str(
        tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=begins, **options
        )
    )


def with_objects(messages: list[Any]) -> list[Any]:
    """The messages with arguments as objects, as templates of transformers have them."""
    parsed = copy.deepcopy(messages)
    for call in (call for one in parsed for call in one.get("tool_calls") or ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return parsed


def folder_with(folder: Path, template: str) -> Path:
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    return write_folder(folder, "bytes", {**names, "chat_template": template})


@pytest.mark.parametrize("name", SAME)
def test_a_template_gets_what_transformers_gives_it(name: str, tmp_path: Path) -> None:
    template, messages = SAME[name]
    folder = folder_with(tmp_path, template)
    tools = {"tools": TOOLS} if "tools" in template else {}
    assert ours(folder, messages, **tools) == theirs(folder, messages, **tools)


@pytest.mark.parametrize("name", AS_OBJECT)
def test_arguments_are_objects_for_templates_that_look_into_them(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, AS_OBJECT[name])
    assert ours(folder, CALLS) == theirs(folder, with_objects(CALLS))


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (known_templates.QWEN, CALLS),
        (known_templates.LLAMA, CALLS),
        (known_templates.MISTRAL, CALLS),
        (known_templates.DEEPSEEK, CALLS),
        (known_templates.GEMMA, [*PARTS, *PARTS, USER]),
        (known_templates.GPT_OSS, CALLS),
        (known_templates.GLM, [*PARTS, *CALLS]),
    ],
)
def test_the_mechanisms_of_well_known_templates(
    template: str, messages: list[Any], tmp_path: Path
) -> None:
    tools = {"tools": TOOLS} if "tools" in template else {}
    wants_text = template is known_templates.DEEPSEEK
    given = messages if wants_text else with_objects(messages)
    folder = folder_with(tmp_path, template)
    assert ours(folder, messages, **tools) == theirs(folder, given, **tools)


def test_parts_are_lines_for_a_template_that_wants_one_text(tmp_path: Path) -> None:
    template = EACH + "{{ m.content }}{% for line in m.content.split('b') %};{% endfor %}" + END
    assert ours(folder_with(tmp_path, template), PARTS) == "a\nb;;"


@pytest.mark.parametrize("content", ["Sure: ", [{"type": "text", "text": "Sure: "}]])
@pytest.mark.parametrize("shown", ["m.content", "m.content | trim"])
def test_a_turn_goes_on_where_it_ended(content: Any, shown: str, tmp_path: Path) -> None:
    loop = "{% for p in m.content %}{{ p.text }}{% endfor %}"
    shown = loop if isinstance(content, list) else f"{{{{ {shown} }}}}"
    folder = folder_with(tmp_path, EACH + shown + "</s>" + END)
    messages = [{"role": "assistant", "content": content}]
    want = theirs(folder, messages, continue_final_message=True)
    assert ours(folder, messages, continue_final_message=True) == want


def test_a_turn_without_content_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no content"):
        ours(folder_with(tmp_path, CALL + END + END), CALLS[:2], continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "turns: roles must alternate"),
        ("{{ raise_exception(message='a\\n\\x00 b' ~ 'c' * 999) }}", f"turns: a b{'c' * 509}"),
        ("{{ raise_exception() }}", "refused the turns"),
        ("{{ messages[7].content.upper() }}", "refused the turns"),
    ],
)
def test_a_refusal_in_a_templates_own_words(template: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ours(folder_with(tmp_path, template), [USER])
    assert str(caught.value).endswith(words)
