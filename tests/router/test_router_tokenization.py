from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from frontdoor_kit import CORPUS, load

from baton.inference.v1 import inference_pb2 as api
from router.folders.templates import TemplateFileError, read_template
from router.requests.chat_template import ChatTemplateError
from router.requests.tokenization import Tokenizer, Tokenizers
from router.server import main
from router.settings import RouterSettings

TURNS = [
    (api.ROLE_SYSTEM, "system", "Be brief & <polite>."),
    (api.ROLE_USER, "user", "Größe? 🎉"),
    (api.ROLE_ASSISTANT, "assistant", "1 m"),
    (api.ROLE_USER, "user", "Thanks"),
]
CHAT = api.ChatPrompt(
    messages=[api.ChatMessage(role=role, content=content) for role, _, content in TURNS]
)


def use_template(folder: Path, template: str) -> Tokenizer:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return load(folder)


def check_against_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(folder))
    ours = load(folder)
    for text in [*CORPUS, "", " ", "two  spaces\n\n", "<|im_start|>user"]:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text).tolist() == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    turns = [{"role": role, "content": content} for _, role, content in TURNS]
    rendered = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(CHAT) == rendered
    expected = theirs(rendered, add_special_tokens=False)["input_ids"]
    assert ours.encode(ours.render_chat(CHAT), False).tolist() == expected


def test_same_as_transformers(folder: Path) -> None:
    check_against_transformers(folder)


@pytest.mark.model
def test_same_as_transformers_on_the_demo_model(demo_model: Path) -> None:
    check_against_transformers(demo_model)


def test_helpers_of_chat_templates_are_those_of_transformers(folder: Path) -> None:
    template = (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {% if message.role == 'assistant' %}{% continue %}{% endif %}\n"
        "    {{- message | tojson }}{{ message | tojson(indent=2) }}\n"
        "{% endfor %}{% generation %}{{ eos_token }}{% endgeneration %}{{ strftime_now('%Y')[:1] }}"
    )
    use_template(folder, template)
    check_against_transformers(folder)


def test_variables_of_a_template_keep_their_types(folder: Path) -> None:
    given = {"depth": 7, "share": 0.5, "names": ["a", {"b": None}]}
    tokenizer = use_template(folder, "{{ [depth, share, names, messages | length] | tojson }}")
    chat = api.ChatPrompt(messages=CHAT.messages)
    chat.template_variables.update(given)
    assert json.loads(tokenizer.render_chat(chat)) == [7, 0.5, ["a", {"b": None}], len(TURNS)]
    assert "7," in tokenizer.render_chat(chat)  # An integer stays one.


def test_a_variable_comes_before_a_special_token_of_its_name(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = use_template(folder, "{{ bos_token }}{{ eos_token }}")
    chat = api.ChatPrompt(messages=CHAT.messages)
    chat.template_variables["eos_token"] = "<end>"
    turns = [{"role": role, "content": content} for _, role, content in TURNS]
    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        turns, tokenize=False, eos_token="<end>"
    )
    assert tokenizer.render_chat(chat) == theirs


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_number_that_json_has_not_is_refused(folder: Path, number: float) -> None:
    chat = api.ChatPrompt(messages=CHAT.messages)
    chat.template_variables["depth"] = number
    with pytest.raises(ChatTemplateError, match="refused"):
        load(folder).render_chat(chat)


@pytest.mark.parametrize("content", ["Sure:", "Sure: ", "user", ""])
def test_a_turn_to_continue_is_that_of_transformers(folder: Path, content: str) -> None:
    from transformers import AutoTokenizer

    last = api.ChatMessage(role=api.ROLE_ASSISTANT, content=content)
    chat = api.ChatPrompt(messages=[*CHAT.messages, last], continue_last=True)
    turns = [{"role": role, "content": content} for _, role, content in TURNS]
    turns.append({"role": "assistant", "content": content})
    theirs = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        turns, tokenize=False, continue_final_message=True
    )
    assert load(folder).render_chat(chat) == theirs


def test_a_turn_that_the_template_drops_cannot_be_continued(folder: Path) -> None:
    tokenizer = use_template(folder, "{{ messages[0].content }}")
    last = api.ChatMessage(role=api.ROLE_ASSISTANT, content="Sure:")
    chat = api.ChatPrompt(messages=[*CHAT.messages, last], continue_last=True)
    with pytest.raises(ChatTemplateError, match="refused"):
        tokenizer.render_chat(chat)


def test_a_file_of_its_own_comes_before_the_config(folder: Path) -> None:
    tokenizer = use_template(folder, "{{ messages[0].content }}")
    assert tokenizer.render_chat(CHAT) == "Be brief & <polite>."


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].content.upper() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_template_may_refuse_and_may_not_reach_out(folder: Path, template: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"refused the turns$"):
        use_template(folder, template).render_chat(CHAT)


def test_no_template(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load(folder).render_chat(CHAT)


def test_no_tokenizer_is_ids_in_ids_out(tmp_path: Path) -> None:
    assert Tokenizer.load(str(tmp_path)) is None


async def test_a_folder_is_read_once_and_long_texts_leave_the_loop_free(folder: Path) -> None:
    tokenizers = Tokenizers()
    first, second = await asyncio.gather(tokenizers.get(str(folder)), tokenizers.get(str(folder)))
    assert first is not None
    assert first is second
    text = " ".join(CORPUS * 2000)
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    long_ids = (await tokenizers.encode(first, text))[0]
    counting.cancel()
    assert turns > 10
    assert first.decode(long_ids.tolist()) == text
    tokenizers.close()


async def test_a_failed_read_is_tried_again(folder: Path) -> None:
    good = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_text("{}")
    tokenizers = Tokenizers()
    with pytest.raises(Exception):  # noqa: B017, PT011 - the library raises no type of its own
        await tokenizers.get(str(folder))
    (folder / "tokenizer.json").write_bytes(good)
    assert await tokenizers.get(str(folder)) is not None
    tokenizers.close()


def test_the_front_door_pulls_in_neither_torch_nor_transformers() -> None:
    check = (
        "import sys, router.doors.frontdoor; "
        "sys.exit(str({'torch', 'transformers'} & set(sys.modules)) if "
        "{'torch', 'transformers'} & set(sys.modules) else 0)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)


async def test_a_file_replaces_the_models_chat_template(folder: Path) -> None:
    file = folder / "other.jinja"
    file.write_text("{{ messages[0].content }}!")
    use_template(folder, "not this one")
    found = Tokenizers(chat_template=read_template(str(file)))
    tokenizer = await found.get(str(folder))
    found.close()
    assert tokenizer is not None
    assert tokenizer.render_chat(CHAT) == "Be brief & <polite>.!"
    assert read_template("") is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "none.jinja: No such file"),
        (b"\xff", "is no text in UTF-8"),
        (b"a\n{% if %}", "none.jinja, line 2: "),
    ],
)
def test_a_file_that_is_no_template_is_told_at_start(
    tmp_path: Path,
    content: bytes | None,
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("router.server.setup_logging", lambda *_: None)  # for all later tests, too
    file = tmp_path / "none.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TemplateFileError, match=complaint):
        read_template(str(file))
    settings = {"listen": "127.0.0.1:0", "internal_listen": "127.0.0.1:0"}
    assert main(RouterSettings(chat_template=str(file), **settings)) == 2
    assert complaint in caplog.text
