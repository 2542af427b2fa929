"""Builds requests of the public API from the arguments of both clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast, get_type_hints

from baton.client.generation import ToolCall
from baton.client.options import Message, Options, Tool
from baton.client.other_names import stated
from baton.client.setting import named, set_fields
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
        client_tag=options.get("client_tag") or "",
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
    options = cast(Options, stated(options, Options))
    for name, value in options.items():
        if name in _SWITCHES and type(value).__name__ not in _BOOLEANS:
            raise TypeError(f"{name}: is True or False, and not {value!r}{_HOW_MANY.get(name, '')}")
    if sum(form is not None for form in (prompt, messages, token_ids)) != 1:
        raise ValueError("give exactly one of prompt, messages and token_ids")
    if messages is None and not options.keys().isdisjoint(_CHAT):
        given = ", ".join(name for name in _CHAT if name in options)
        raise ValueError(f"only with messages: {given}")
    request = pb.GenerationInput(model=options.get("model", ""))
    if prompt is not None:
        request.text = _one_text(prompt)
    elif messages is not None:
        request.chat.CopyFrom(chat_prompt(messages))
        _set_chat(request.chat, options)
    elif token_ids is not None:
        with named("token_ids"):
            request.token_ids.ids.extend(token_ids)
        request.token_ids.SetInParent()
    set_fields(request, options, _INPUT)
    set_fields(request.sampling, options, _SAMPLING)
    set_fields(request.stop, options, _STOP)
    set_fields(request.output, options, _OUTPUT)
    with named("logit_bias"):
        request.sampling.logit_bias.update(options.get("logit_bias", {}))
    stop = options.get("stop", ())
    with named("stop"):
        request.stop.sequences.extend([stop] if isinstance(stop, str) else stop)
    with named("stop_token_ids"):
        request.stop.token_ids.extend(options.get("stop_token_ids", ()))
    with named("allowed_token_ids"):
        request.sampling.allowed_token_ids.extend(options.get("allowed_token_ids", ()))
    with named("bad_words"):
        request.sampling.bad_words.extend(_texts(options.get("bad_words", ())))
    for name, content in options.get("extensions", {}).items():
        request.extensions[name] = content.encode() if isinstance(content, str) else content
    _set_structure(request, options)
    _set_beams(request, options)
    return request


def _set_beams(request: pb.GenerationInput, options: Options) -> None:
    if "beams" not in options:
        if given := [name for name in ("length_penalty", "early_stopping") if name in options]:
            raise ValueError(f"only with beams: {', '.join(given)}")
        return
    beams, early = pb.BeamSearch(), options.get("early_stopping", "no_better")
    if early not in _EARLY_STOPPING:
        raise ValueError(f"early_stopping is one of {', '.join(_EARLY_STOPPING)}, not {early!r}")
    beams.early_stopping = _EARLY_STOPPING[early]
    set_fields(beams, {"width": options["beams"], **options}, ("width", "length_penalty"))
    request.beams.CopyFrom(beams)


def _set_chat(chat: pb.ChatPrompt, options: Options) -> None:
    with named("template_variables"):
        chat.template_variables.update(options.get("template_variables", {}))
    set_fields(chat, options, ("continue_last", *_CHAT_SCALARS))
    chat.tools.extend(map(_tool, options.get("tools", ())))
    choice = options.get("tool_choice")
    if isinstance(choice, Mapping):  # As OpenAI's API has it.
        choice = _function(choice)["name"]
    if isinstance(choice, str) and choice in _MODES:
        chat.tool_choice.mode = _MODES[choice]
    elif choice is not None:
        with named("tool_choice"):
            chat.tool_choice.name = choice


def _tool(tool: Tool | Mapping[str, Any]) -> pb.Tool:
    """A tool, its function by itself or as OpenAI's API writes it."""
    function = _function(tool)
    parameters = function.get("parameters")
    with named("tools"):
        return pb.Tool(
            name=function["name"],
            description=function.get("description") or "",
            parameters="" if parameters is None else _json(parameters),
            strict=function.get("strict") or False,
        )


def _function(tool: Any) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise TypeError(f"a tool is a mapping, and not of type {type(tool).__name__}")
    function = tool.get("function", tool) if tool.get("type", "function") == "function" else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise ValueError("a tool is a function, and has a name")
    return function


def _set_structure(request: pb.GenerationInput, options: Options) -> None:
    if len(given := [name for name in _FORMS if name in options]) > 1:
        raise ValueError(f"give only one of {', '.join(given)}")
    if "json_schema" in options:
        with named("json_schema"):
            request.structure.json_schema.schema = _json(options["json_schema"])
        request.structure.json_schema.strict = options.get("strict", False)
    elif "strict" in options:
        raise ValueError("strict belongs to json_schema; a tool has a strict of its own")
    if "choice" in options:
        with named("choice"):
            request.structure.choice.texts.extend(_texts(options["choice"]))
    set_fields(request.structure, options, ("json_object", "regex", "lark", "gbnf"))


def _json(schema: str | Mapping[str, Any]) -> str:
    """The text of a schema, whose order of properties is the output's, or of arguments."""
    return schema if isinstance(schema, str) else json.dumps(schema)


def _texts(texts: Sequence[str]) -> Sequence[str]:
    if isinstance(texts, str):
        raise TypeError("must be several texts, not one")
    return texts


def _one_text(prompt: object) -> str:
    if not isinstance(prompt, str):
        raise TypeError(f"the prompt is one text, and not of type {type(prompt).__name__}")
    return prompt


_SWITCHES = frozenset(name for name, kind in get_type_hints(Options).items() if kind is bool)
_BOOLEANS = ("bool", "bool_")
"""Types of a switch: Python's, and numpy's, which may not be installed."""
_HOW_MANY = {"logprobs": "; top_logprobs says how many"}
_INPUT = (
    "choices",
    "priority",
    "add_special_tokens",
    "cache_salt",
    "truncate_prompt_tokens",
    "speculation",
    "best_of",
)
_EARLY_STOPPING = {
    "no_better": pb.EARLY_STOPPING_UNSPECIFIED,
    "at_once": pb.EARLY_STOPPING_AT_ONCE,
    "never_better": pb.EARLY_STOPPING_NEVER_BETTER,
}
_CHAT_SCALARS = ("parallel_tool_calls", "reasoning_effort", "thinking_token_budget")
_CHAT = (
    "template_variables",
    "continue_last",
    "tools",
    "tool_choice",
    "message",
    "omit_reasoning",
    *_CHAT_SCALARS,
)
_FORMS = ("json_schema", "json_object", "regex", "choice", "lark", "gbnf")
_MODES = {
    "auto": pb.TOOL_MODE_AUTO,
    "none": pb.TOOL_MODE_NONE,
    "required": pb.TOOL_MODE_REQUIRED,
}
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
_OUTPUT = (
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "omit_text",
    "skip_special_tokens",
    "message",
    "omit_reasoning",
    "min_message_ms",
)


def chat_prompt(messages: Sequence[Message]) -> pb.ChatPrompt:
    """Makes a chat prompt of turns.

    Raises:
        ValueError: a role is unknown, or a turn lacks role or content, or a call its id or name.
        TypeError: they are no turns, or a content is no text and no parts of text.
    """
    if isinstance(messages, str | Mapping):
        raise TypeError("messages are several turns, each with a role and a content")
    return pb.ChatPrompt(messages=map(_turn, messages))


def _turn(turn: Message) -> pb.ChatMessage:
    if not isinstance(turn, Mapping):
        raise TypeError(_no_message(turn))
    if "role" not in turn or not ("content" in turn or turn.get("tool_calls")):
        raise ValueError("a message has a role and a content")
    content = turn.get("content")
    said: dict[str, Any] = {"content": content}
    if not isinstance(content, str | None):
        said = {"content_parts": _parts(content)}
    return pb.ChatMessage(
        role=_role(turn["role"]),
        **said,
        reasoning=turn.get("reasoning", ""),
        tool_calls=map(_called, turn.get("tool_calls") or ()),
        tool_call_id=turn.get("tool_call_id", ""),
    )


def _no_message(turn: object) -> str:
    several = "; several chats are for LLM.generate" if isinstance(turn, list) else ""
    return f"a message is a mapping, and not of type {type(turn).__name__}{several}"


def _parts(content: object) -> Sequence[str]:
    """The texts of a content of several parts, each a text or `{"type": "text", "text": TEXT}`."""
    found = content if isinstance(content, Sequence) else (None,)
    texts: list[Any] = [_text(one) if isinstance(one, Mapping) else one for one in found]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a content is a text, or several parts of text")
    return texts


def _text(part: Mapping[str, Any]) -> object:
    return part.get("text") if part.get("type", "text") == "text" else None


def _called(call: ToolCall | Mapping[str, Any]) -> pb.ToolCall:
    """A call of a result, or as OpenAI's API writes it."""
    if isinstance(call, Mapping):
        function = call.get("function")
        if not isinstance(function, Mapping) or "name" not in function or "id" not in call:
            raise ValueError("a call has an id, and a function with a name")
        arguments = _json(function.get("arguments", ""))
        return pb.ToolCall(id=call["id"], name=function["name"], arguments=arguments)
    return pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)


def _role(name: str) -> pb.Role.ValueType:
    try:
        return {
            "system": pb.ROLE_SYSTEM,
            "developer": pb.ROLE_SYSTEM,
            "user": pb.ROLE_USER,
            "assistant": pb.ROLE_ASSISTANT,
            "tool": pb.ROLE_TOOL,
        }[name]
    except KeyError:
        raise ValueError(f"a role is system, user, assistant or tool, not {name!r}") from None
