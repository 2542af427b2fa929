"""Model folders are read as transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from frontdoor_kit import load
from tiny_tokenizers import KINDS, TEMPLATE, texts, write_folder

from baton.inference.v1 import inference_pb2 as api
from router.errors import RouterError
from router.folders.classes import _OTHERS, CLASSES, TokenizerError
from router.requests.chat_template import ChatTemplateError
from router.requests.tokenization import Tokenizers

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LISTED = {
    index: {"content": text, "lstrip": False, "rstrip": text == "<new>", "normalized": False,
            "single_word": False, "special": True}
    for index, text in ((0, "<unk>"), (1, "<s>"), (2, "</s>"), (420, "<new>"))
}  # fmt: skip
OBJECT = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False,
          "single_word": False}  # fmt: skip
MODELS = (
    "llama", "smollm3", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2",
    "gemma3_text", "phi3", "granite", "olmo2", "olmo3", "gpt_oss",
)  # fmt: skip


def check(folder: Path, count: int) -> None:
    """Compares ids, texts and chats with those of transformers."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(str(folder)), load(folder)
    for text in texts(count):
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special).tolist() == ids, text
            for skip in (True, False):
                want = theirs.decode(ids, skip_special_tokens=skip)
                assert ours.decode(ids, skip) == want, text
    turns = [{"role": "user", "content": text} for text in (" Hi", "Ho ", "<s>")]
    roles = [api.ChatMessage(role=api.ROLE_USER, content=turn["content"]) for turn in turns]
    chat = api.ChatPrompt(messages=roles)
    if theirs.chat_template is None:
        with pytest.raises(ChatTemplateError):
            ours.render_chat(chat)
        return
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    assert ours.render_chat(chat) == theirs.apply_chat_template(turns, **options)
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat.tools.add(name="f")
    if "tools" in ours.template_names:
        assert ours.render_chat(chat) == theirs.apply_chat_template(turns, tools=[tool], **options)


FOLDERS: dict[str, tuple[str, dict[str, Any] | None, dict[str, Any], dict[str, Any]]] = {
    "no config": ("bytes", None, {}, {}),
    "llama 2": ("pieces", {"tokenizer_class": "LlamaTokenizer", "legacy": False}, {}, {}),
    "legacy": ("pieces", {"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, {}, {}),
    "without a space": (
        "pieces",
        {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
        {},
        {},
    ),
    "mistral": ("pieces", {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "mistral"}, {}),
    "llama 3": ("bytes", {"tokenizer_class": "LlamaTokenizerFast"}, {}, {}),
    "distilled": ("bytes", {"tokenizer_class": "LlamaTokenizer"}, {"model_type": "qwen2"}, {}),
    "named by the model": ("pieces", {}, {"tokenizer_class": "LlamaTokenizer"}, {}),
    "its own code": (
        "pieces",
        {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"model_type": "qwen3"},
        {},
    ),
    "its own code, and another class than its model has": (
        "pieces",
        {"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["a.B", None]}},
        {"model_type": "phi3"},
        {},
    ),
    "map": ("bytes", {**NAMES, "bos_token": None}, {}, {"special_tokens_map.json": {
        "bos_token": "<s>", "eos_token": OBJECT, "additional_special_tokens": ["<pad>", "<x>"]}}),
    "map of no weight": ("bytes", {**NAMES, "added_tokens_decoder": LISTED}, {}, {
        "special_tokens_map.json": {"bos_token": "<|im_start|>"}}),
    "added": ("pieces", {"tokenizer_class": "LlamaTokenizer", **NAMES}, {}, {
        "added_tokens.json": {"<new>": 420, "</s>": 2}}),
    "listed": ("pieces", {"tokenizer_class": "LlamaTokenizer", "added_tokens_decoder": LISTED}, {},
               {}),
    "extra": ("bytes", {**NAMES, "extra_special_tokens": {"image_token": "<img>"}}, {}, {}),
    "split": ("bytes", {**NAMES, "split_special_tokens": True}, {}, {}),
    "templates": ("bytes", {**NAMES, "chat_template": [
        {"name": "default", "template": TEMPLATE},
        {"name": "tool_use", "template": "T{{ tools[0].function.name }}" + TEMPLATE}]}, {}, {}),
    "object of templates": ("bytes", {"chat_template": {
        "default": TEMPLATE, "tool_use": "T{{ tools | length }}"}}, {}, {}),
    "files of templates": ("bytes", {"chat_template": "not this"}, {}, {
        "chat_template.jinja": TEMPLATE,
        "additional_chat_templates/tool_use.jinja": "T{{ tools | length }}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    kind, config, model, files = FOLDERS[name]
    if config is not None:
        config = {"chat_template": TEMPLATE, **config}
    check(write_folder(tmp_path, kind, config, {"model_type": "llama", **model}, files), 25)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["", "PreTrainedTokenizerFast", "OurTokenizer", *CLASSES])
def test_every_class_on_two_hundred_texts(name: str, kind: str, tmp_path: Path) -> None:
    stated = {"tokenizer_class": name} if name else {}
    for model in MODELS:
        config = {**stated, **NAMES, "chat_template": TEMPLATE}
        check(write_folder(tmp_path / model, kind, config, {"model_type": model}), 200)
    further = {**stated, "chat_template": TEMPLATE, "added_tokens_decoder": LISTED, "legacy": True}
    for spaced in (
        (True, False) if name.startswith(("GPT", "Cohere")) else (True, False, None)
    ):  # null fails there
        config = {**further, "add_prefix_space": spaced}
        check(write_folder(tmp_path / f"spaced {spaced}", kind, config), 200)


@pytest.mark.slow
def test_every_other_class_of_transformers_is_known() -> None:
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    names = {name for name in TOKENIZER_MAPPING_NAMES.values() if name}
    names |= {name for name in dir(transformers) if name.endswith(("Tokenizer", "TokenizerFast"))}
    assert {name.removesuffix("Fast") for name in names} - _OTHERS - set(CLASSES) == {
        "AutoTokenizer"
    }


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"tokenizer_class": "T5TokenizerFast"}, "of the class T5TokenizerFast are not supported"),
        ({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["a.Own", None]}}, "has code"),
        ({"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
          "clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces"),
        ({"eos_token": {"id": 1}}, "special token"),
        ({"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.json"]}, "another file"),
        ({"fix_mistral_regex": True, "model": "mistral"}, "fix_mistral_regex"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_so_is_refused_by_name(
    config: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(TokenizerError, match=complaint):
        load(write_folder(tmp_path, "bytes", config, {"model_type": config.pop("model", "llama")}))


def test_templates_without_a_default(tmp_path: Path) -> None:
    config = {"chat_template": {"tool_use": TEMPLATE + "{{ tools }}"}}
    tokenizer = load(write_folder(tmp_path, "bytes", config))
    chat = api.ChatPrompt(messages=[api.ChatMessage(role=api.ROLE_USER, content="Hi")])
    with pytest.raises(ChatTemplateError, match="several chat templates and no default"):
        tokenizer.render_chat(chat)
    chat.tools.add(name="f")
    assert "Hi" in tokenizer.render_chat(chat)


async def test_a_request_is_told_which_tokenizer_cannot_be_used(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "bytes", {"tokenizer_class": "T5Tokenizer"})
    tokenizers = Tokenizers()
    with pytest.raises(RouterError, match=r"TOKENIZER_UNSUPPORTED.*T5Tokenizer"):
        await tokenizers.get(str(folder))
    tokenizers.close()
