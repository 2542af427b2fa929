"""Builds requests of the public API from the arguments of both clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from baton.client.generation import Message, Options
from baton.inference.v1 import inference_pb2 as pb

_Request = TypeVar("_Request", pb.GenerateRequest, pb.StreamGenerateRequest)


def generation_request(
    kind: type[_Request],
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Options,
) -> _Request:
    """Makes a request of Generate or StreamGenerate.

    Raises:
        ValueError: not exactly one form of prompt was given, or a role is unknown.
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
    """Makes a request of Tokenize.

    Raises:
        ValueError: not exactly one of text and messages was given, or a role is unknown.
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


def generation_input(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    options: Options,
) -> pb.GenerationInput:
    """Makes the part that requests of Generate and StreamGenerate share.

    Raises:
        ValueError: not exactly one of prompt, messages and token ids was given, a role is unknown,
            or a number is out of an option's range.
        TypeError: there is no such option, or it has the wrong type.
    """
    for name in options.keys() - Options.__annotations__:
        raise TypeError(f"there is no option {name!r}")
    if sum(form is not None for form in (prompt, messages, token_ids)) != 1:
        raise ValueError("give exactly one of prompt, messages and token_ids")
    if messages is None and not options.keys().isdisjoint(_CHAT):
        raise ValueError("only messages have template variables and a last turn to continue")
    request = pb.GenerationInput(model=options.get("model", ""))
    if prompt is not None:
        request.text = _one_text(prompt)
    elif messages is not None:
        request.chat.CopyFrom(chat_prompt(messages))
        request.chat.template_variables.update(options.get("template_variables", {}))
        request.chat.continue_last = options.get("continue_last", False)
    elif token_ids is not None:
        request.token_ids.ids.extend(token_ids)
        request.token_ids.SetInParent()
    _set(request, options, ("choices", "priority", "add_special_tokens"))
    _set(request.sampling, options, _SAMPLING)
    _set(request.stop, options, _STOP)
    _set(request.output, options, _OUTPUT)
    request.sampling.logit_bias.update(options.get("logit_bias", {}))
    stop = options.get("stop", ())
    request.stop.sequences.extend([stop] if isinstance(stop, str) else stop)
    request.stop.token_ids.extend(options.get("stop_token_ids", ()))
    return request


def _one_text(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise TypeError(f"the prompt is one text, and not of type {type(prompt).__name__}")
    return prompt


_CHAT = ("template_variables", "continue_last")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "seed",
)
_STOP = ("max_tokens", "min_tokens", "ignore_eos", "include_stop")
_OUTPUT = ("logprobs", "top_logprobs", "prompt_logprobs", "omit_text")


def _set(
    message: pb.GenerationInput | pb.SamplingOptions | pb.StopOptions | pb.OutputOptions,
    options: Options,
    names: Sequence[str],
) -> None:
    values: Mapping[str, object] = options
    for name in names:
        if name in values:
            try:
                setattr(message, name, values[name])
            except (TypeError, ValueError) as error:
                raise type(error)(f"{name}: {error}") from None


def chat_prompt(messages: Sequence[Message]) -> pb.ChatPrompt:
    """Makes a chat prompt of turns.

    Raises:
        ValueError: a role is unknown, or a turn lacks role or content.
    """
    if any("role" not in turn or "content" not in turn for turn in messages):
        raise ValueError("a message has a role and a content")
    return pb.ChatPrompt(
        messages=[pb.ChatMessage(role=_role(m["role"]), content=m["content"]) for m in messages]
    )


def _role(name: str) -> pb.Role.ValueType:
    try:
        return {
            "system": pb.ROLE_SYSTEM,
            "user": pb.ROLE_USER,
            "assistant": pb.ROLE_ASSISTANT,
        }[name]
    except KeyError:
        raise ValueError(f"a role is system, user or assistant, not {name!r}") from None
