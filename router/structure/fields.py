"""Checks the fields of a request that say what form its answer has, before any of them is parsed.

The paths are those of `inference.proto`. Counting comes first, so that nothing costs more than it
may.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Final

from google.protobuf import struct_pb2

from baton.inference.v1 import inference_pb2 as api
from router.errors import Violation
from router.structure.schema import MAX_SCHEMA_BYTES

MAX_TOOLS: Final = 128
"""OpenAI's own bound."""
MAX_CHOICES: Final = 1024
"""A grammar of so many texts compiles within milliseconds."""
MAX_SALT_BYTES: Final = 256
"""It only tells tenants' pages apart; a digest has 32."""
MAX_ALLOWED_TOKENS: Final = 16_384
"""A mask of its own for each row: 64 KiB of ids in the message."""
MAX_BAD_WORDS: Final = 128
"""Each is matched at every token of the row."""
MAX_BAD_WORD_BYTES: Final = 256
"""So far back a match may begin."""
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_GBNF_RULE: Final = re.compile(r"^[ \t]*[A-Za-z][\w-]*[ \t]*::=", re.MULTILINE)
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def is_gbnf(text: str) -> bool:
    """Whether a grammar of either kind is GBNF: a line begins with a rule of its form. Lark may
    have `::=` in a literal."""
    return _GBNF_RULE.search(text) is not None


def check_answer(generation: api.GenerationInput) -> Iterator[Violation]:
    """Broken rules of everything that shapes the answer."""
    if generation.HasField("structure"):
        yield from _check_structure(generation.structure)
        if generation.stop.ignore_eos:
            yield Violation("input.stop.ignore_eos", "cannot stand beside a structure")
    if generation.WhichOneof("prompt") == "chat":
        yield from check_chat(generation.chat, "input.chat")
    elif generation.output.message:
        yield Violation("input.output.message", "needs a chat")
    if len(generation.cache_salt.encode()) > MAX_SALT_BYTES:
        yield Violation("input.cache_salt", f"must have at most {MAX_SALT_BYTES} bytes")
    if generation.HasField("truncate_prompt_tokens") and not generation.truncate_prompt_tokens:
        yield Violation("input.truncate_prompt_tokens", "must be at least 1")
    sampling, path = generation.sampling, "input.sampling"
    if len(sampling.allowed_token_ids) > MAX_ALLOWED_TOKENS:
        rule = f"must have at most {MAX_ALLOWED_TOKENS} ids"
        yield Violation(f"{path}.allowed_token_ids", rule)
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        yield Violation(f"{path}.bad_words", f"must have at most {MAX_BAD_WORDS} texts")
    for index, word in enumerate(sampling.bad_words[:MAX_BAD_WORDS]):
        if not 1 <= len(word.encode()) <= MAX_BAD_WORD_BYTES:
            rule = f"must have 1 to {MAX_BAD_WORD_BYTES} bytes"
            yield Violation(f"{path}.bad_words[{index}]", rule)


def _check_structure(structure: api.Structure) -> Iterator[Violation]:
    path, form = "input.structure", structure.WhichOneof("form")
    if form is None:
        yield Violation(path, "a form must be set")
        return
    if structure.ByteSize() > MAX_SCHEMA_BYTES:
        yield Violation(f"{path}.{form}", f"must have at most {MAX_SCHEMA_BYTES} bytes")
        return
    if form == "choice":
        texts = structure.choice.texts
        if not 1 <= len(texts) <= MAX_CHOICES:
            yield Violation(f"{path}.choice", f"must have 1 to {MAX_CHOICES} texts")
        elif not all(texts):
            yield Violation(f"{path}.choice", "must hold no empty text")
    elif form == "json_schema":
        if not structure.json_schema.schema:
            yield Violation(f"{path}.json_schema.schema", "must not be empty")
    elif not getattr(structure, form):
        rule = "must be true" if form == "json_object" else "must not be empty"
        yield Violation(f"{path}.{form}", rule)


def check_chat(chat: api.ChatPrompt, path: str) -> Iterator[Violation]:
    """Broken rules of tools, and of the turns that call them."""
    yield from _check_tools(chat, path)
    for name, value in chat.template_variables.fields.items():
        if not _is_finite(value):
            yield Violation(f"{path}.template_variables.{name}", "must hold finite numbers alone")
    if chat.reasoning_effort and chat.reasoning_effort not in EFFORTS:
        yield Violation(f"{path}.reasoning_effort", f"must be one of {', '.join(EFFORTS)}")
    called: set[str] = set()
    for index, turn in enumerate(chat.messages):
        here = f"{path}.messages[{index}]"
        if turn.tool_calls and turn.role != api.ROLE_ASSISTANT:
            yield Violation(f"{here}.tool_calls", "only the assistant calls functions")
        if turn.role == api.ROLE_TOOL:
            if turn.tool_call_id not in called:
                yield Violation(f"{here}.tool_call_id", "must be the id of an earlier call")
        elif turn.tool_call_id:
            yield Violation(f"{here}.tool_call_id", "only a tool's turn has one")
        for number, call in enumerate(turn.tool_calls):
            called.add(call.id)
            if not call.id or not call.name:
                yield Violation(f"{here}.tool_calls[{number}]", "must have an id and a name")


def _is_finite(value: struct_pb2.Value) -> bool:
    """Whether a chat template can be given it: JSON has no other numbers."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if not math.isfinite(one.number_value):
            return False
        waiting += one.list_value.values
        waiting += one.struct_value.fields.values()
    return True


def _tool_bytes(tool: api.Tool) -> int:
    """Bytes of a tool. It may be there twice, whole and in parts."""
    whole = len(tool.definition.encode())
    return max(whole, tool.ByteSize() - whole)


def _check_tools(chat: api.ChatPrompt, path: str) -> Iterator[Violation]:
    if len(chat.tools) > MAX_TOOLS:
        yield Violation(f"{path}.tools", f"must be at most {MAX_TOOLS}")
        return
    if sum(map(_tool_bytes, chat.tools)) > MAX_SCHEMA_BYTES:
        yield Violation(f"{path}.tools", f"must have at most {MAX_SCHEMA_BYTES} bytes together")
        return
    names: set[str] = set()
    for index, tool in enumerate(chat.tools):
        if not _NAME.fullmatch(tool.name):
            rule = "must be 1 to 64 letters, digits, '_', '-' and '.'"
            yield Violation(f"{path}.tools[{index}].name", rule)
        elif tool.name in names:
            yield Violation(f"{path}.tools[{index}].name", "is the name of an earlier tool")
        names.add(tool.name)
    match chat.tool_choice.WhichOneof("choice"):
        case "name" if chat.tool_choice.name not in names:
            yield Violation(f"{path}.tool_choice.name", "must be the name of a tool")
        case "mode":
            mode = chat.tool_choice.mode
            if mode not in api.ToolMode.values() or mode == api.TOOL_MODE_UNSPECIFIED:
                yield Violation(f"{path}.tool_choice.mode", "must be a known mode")
            elif mode == api.TOOL_MODE_REQUIRED and not chat.tools:
                yield Violation(f"{path}.tool_choice.mode", "needs tools")
