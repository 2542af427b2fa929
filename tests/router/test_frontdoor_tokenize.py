"""Tokenize: the ids that Generate would run, with or without special tokens, and their texts."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import tokenizers
from frontdoor_kit import ScriptedDispatcher, open_door, plays, served_model, write_tokenizer
from tokenizers.processors import TemplateProcessing

from baton.client.clients import AsyncClient
from baton.errors import InvalidRequestError
from baton.inference.v1 import inference_pb2 as api

TEXT = "naïve 🎉 fox"
CHAT = api.ChatPrompt(messages=[api.ChatMessage(role=api.ROLE_USER, content=TEXT)])


@pytest.fixture
def tokenizer(tmp_path: Path) -> tokenizers.Tokenizer:
    """One that puts a beginning of text before a text, as Llama's does."""
    tokenizer = write_tokenizer(tmp_path)
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tokenizer


@pytest.fixture
def dispatcher(tokenizer: tokenizers.Tokenizer, tmp_path: Path) -> ScriptedDispatcher:
    return ScriptedDispatcher([served_model(tmp_path)], plays([70]))


async def test_special_tokens(dispatcher: ScriptedDispatcher) -> None:
    async with open_door(dispatcher) as door:

        async def ids(**fields: object) -> list[int]:
            response = await door.stub.Tokenize(api.TokenizeRequest(**fields))
            return list(response.token_ids)

        bare = await ids(text=TEXT, add_special_tokens=False)
        assert await ids(text=TEXT) == await ids(text=TEXT, add_special_tokens=True) == [0, *bare]
        turns = await ids(chat=CHAT)
        assert turns == await ids(chat=CHAT, add_special_tokens=False)
        assert await ids(chat=CHAT, add_special_tokens=True) == [0, *turns]
        for prompt, special in product(({"text": TEXT}, {"chat": CHAT}), (None, True, False)):
            generation = api.GenerationInput(**prompt, add_special_tokens=special)
            await door.stub.Generate(api.GenerateRequest(input=generation))
            wanted = await ids(**prompt, add_special_tokens=special)
            assert dispatcher.jobs[-1].prompt_ids.tolist() == wanted
        async with AsyncClient(door.address) as client:
            assert list(await client.tokenize(TEXT)) == [0, *bare]
            assert list(await client.tokenize(TEXT, add_special_tokens=False)) == bare
            await client.generate(TEXT, add_special_tokens=False)
            assert dispatcher.jobs[-1].prompt_ids.tolist() == bare
            await client.generate(token_ids=[7, 8], add_special_tokens=False)
            with pytest.raises(InvalidRequestError) as caught:
                await client.generate(token_ids=[7, 8], add_special_tokens=True)
        assert caught.value.violations[0].field == "input.add_special_tokens"


async def test_texts_of_tokens(
    dispatcher: ScriptedDispatcher, tokenizer: tokenizers.Tokenizer
) -> None:
    async with open_door(dispatcher) as door:
        request = api.TokenizeRequest(text=TEXT, token_texts=True)
        response = await door.stub.Tokenize(request)
        without = await door.stub.Tokenize(api.TokenizeRequest(text=TEXT))
    assert not without.token_texts
    assert response.token_ids == without.token_ids
    assert len(response.token_texts) == len(response.token_ids)
    assert response.token_texts[0] == "<|endoftext|>"
    texts = "".join(response.token_texts[1:])
    assert texts.startswith("na")
    assert texts.endswith(" fox")
    whole = [text for text in response.token_texts[1:] if "\ufffd" not in text]
    assert set("".join(whole)) <= set(TEXT)
