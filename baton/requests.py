"""Requests of the public API, from what the callers of both clients wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from baton.generation import Message, Options, chat_prompt, generation_input
from baton.inference.v1 import inference_pb2 as pb

_Request = TypeVar("_Request", pb.GenerateRequest, pb.StreamGenerateRequest)


def generation_request(
    kind: type[_Request],
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Options,
) -> _Request:
    """Of Generate or StreamGenerate.

    Raises:
        ValueError: not exactly one form of prompt, or a role nobody knows.
    """
    return kind(
        input=generation_input(prompt, messages, token_ids, options),
        client_tag=options.get("client_tag", ""),
    )


def tokenize_request(
    text: str | None,
    messages: Sequence[Message] | None,
    model: str,
    add_special_tokens: bool | None,
) -> pb.TokenizeRequest:
    """Of Tokenize.

    Raises:
        ValueError: not exactly one of text and messages, or a role nobody knows.
    """
    if (text is None) == (messages is None):
        raise ValueError("give exactly one of text and messages")
    if messages is not None:
        request = pb.TokenizeRequest(model=model, chat=chat_prompt(messages))
    else:
        request = pb.TokenizeRequest(model=model, text=text or "")
    if add_special_tokens is not None:
        request.add_special_tokens = add_special_tokens
    return request
