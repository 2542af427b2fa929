"""/tokenize and /detokenize: what generating would run, and back, for the official client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import openai_kit
import pytest
from frontdoor_kit import CHAT_TEMPLATE, write_tokenizer
from openai_kit import Port, answers, open_port
from tokenizers.processors import TemplateProcessing

from router.doors.auth import TokenGate

TEXT = "naïve 🎉 fox"
TURNS = [{"role": "user", "content": TEXT}]
SPECIAL = "<|endoftext|>"


async def ask(port: Port, path: str, **body: object) -> Any:
    """The paths stand beside /v1."""
    url = f"http://{port.server.address}{path}"
    return await port.client.post(url, cast_to=object, body=body)


async def test_ids_are_those_that_generating_runs(tmp_path: Path) -> None:
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        text = await ask(port, "/tokenize", model="tiny", prompt=TEXT)
        await port.client.completions.create(model="tiny", prompt=TEXT)
        assert text["tokens"] == port.job.prompt_ids.tolist()
        assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), 256)
        assert text["token_strs"] is None
        turns = await ask(port, "/tokenize", messages=TURNS)
        await port.client.chat.completions.create(model="tiny", messages=TURNS)
        assert turns["tokens"] == port.job.prompt_ids.tolist() != text["tokens"]


async def test_there_and_back_with_special_tokens(tmp_path: Path) -> None:
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        said = await ask(port, "/tokenize", prompt=SPECIAL + TEXT, return_token_strs=True)
        assert said["token_strs"][0] == SPECIAL
        assert len(said["token_strs"]) == said["count"]
        back = await ask(port, "/detokenize", tokens=said["tokens"])
        assert back == {"prompt": SPECIAL + TEXT}
        assert await ask(port, "/detokenize", tokens=[]) == {"prompt": ""}


async def test_a_request_chooses_its_special_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_with_beginning(folder: Path) -> None:
        tokenizer = write_tokenizer(folder)
        tokenizer.post_processor = TemplateProcessing(
            single=f"{SPECIAL} $A", special_tokens=[(SPECIAL, 0)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))

    monkeypatch.setattr(openai_kit, "write_tokenizer", write_with_beginning)
    calls: list[tuple[str, dict[str, object]]] = [
        ("/completions", {"prompt": TEXT}),
        ("/completions", {"prompt": TEXT, "echo": True, "logprobs": 0}),
        ("/chat/completions", {"messages": TURNS}),
    ]
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        for path, body in calls:
            begins = []
            for special in (None, True, False):
                asked = {**body, "add_special_tokens": special}
                await port.client.post(path, cast_to=object, body=asked)
                begins.append(port.job.prompt_ids.tolist()[0] == 0)
            assert begins == [path == "/completions", True, False]


async def test_what_writes_prompts_elsewhere(tmp_path: Path) -> None:
    """Evaluations that have no tokenizer of their own ask for special tokens and the template."""
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        url = f"http://{port.server.address}/tokenizer_info"
        info: Any = await port.client.get(url, cast_to=object)
        assert (info["bos_token"], info["chat_template"]) == (SPECIAL, CHAT_TEMPLATE)
        assert await port.client.get(url + "?model=tiny", cast_to=object) == info
        with pytest.raises(openai.NotFoundError):
            await port.client.get(url + "?model=other", cast_to=object)


BAD: list[tuple[str, dict[str, object], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": ""}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": TURNS}, "prompt"),
    ("/tokenize", {"messages": [{"role": "cook", "content": "a"}]}, "messages[0].role"),
    ("/tokenize", {"messages": TURNS, "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"messages": TURNS, "tools": [{}]}, "tools[0].type"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens"),
    ("/detokenize", {"tokens": [1, 1 << 31]}, "tokens[1]"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
async def test_what_cannot_be_answered(
    tmp_path: Path, path: str, body: dict[str, object], param: str
) -> None:
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(port, path, **body)
        assert caught.value.param == param
        with pytest.raises(openai.NotFoundError):
            await ask(port, path, prompt="a", tokens=[1], model="other")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_only_those_with_a_token_are_answered(tmp_path: Path, path: str) -> None:
    (tmp_path / "tokens.toml").write_text('"sk-good" = "acme"\n')
    gate = TokenGate(tmp_path / "tokens.toml")
    async with open_port(tmp_path, answers(lambda *_: [70]), gate=gate) as port:
        with pytest.raises(openai.AuthenticationError):
            await ask(port, path, prompt="a", tokens=[1])
        info = f"http://{port.server.address}/tokenizer_info"
        with pytest.raises(openai.AuthenticationError):
            await port.client.get(info, cast_to=object)


async def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_api(tmp_path: Path) -> None:
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(openai.InternalServerError) as caught:
            await port.client.get(f"http://{port.server.address}/tokenizer_info", cast_to=object)
        assert caught.value.code == "internal"


async def test_a_model_without_a_tokenizer_has_no_text(tmp_path: Path) -> None:
    async with open_port(tmp_path, answers(lambda *_: [70])) as port:
        (tmp_path / "tokenizer.json").unlink()
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            with pytest.raises(openai.BadRequestError, match="no tokenizer"):
                await ask(port, path, **body)
        info = f"http://{port.server.address}/tokenizer_info"
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            await port.client.get(info, cast_to=object)
