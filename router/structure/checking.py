"""Writes the grammar of an answer and checks it, in a process aside (`router.aside`).

llguidance recurses, and compiling can take long and much memory. So whatever a client sent is read
first by a process that may end. Its stack is a small part of what workers have
(`engine.masks.matchers`): a grammar that fits here does not end a worker.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher, LLTokenizer

from baton.inference.v1 import inference_pb2 as api
from router.answers.forms import ResponseForm, Thought
from router.aside.wire import Bounds
from router.structure.grammar import CallRules, Grammar
from router.structure.rules import Tool
from router.structure.schema import LIMITS, SchemaError, read

BOUNDS: Final = Bounds(cpu_s=2.0, memory_bytes=256 << 20, time_s=60.0)
"""Bounds of one check. A schema of 250 KiB takes 0.2 s and some 10 MB."""
STACK_BYTES: Final = 1 << 20
"""Workers have 64 times as much behind a grammar."""


class Question(NamedTuple):
    """What a grammar is made of."""

    generation: bytes
    """A `GenerationInput` with what shapes the answer."""
    form: ResponseForm
    thought: Thought
    special_tokens: Mapping[str, int]
    """Ids of special tokens by their texts."""
    lead: str = ""
    """Before content, where the answer is read in parts."""


class Checked(NamedTuple):
    """A grammar that workers can compile, and that has a first token."""

    grammar: str
    dropped: tuple[str, ...]
    """JSON pointers of keywords that it does not enforce."""


def prepare(argument: Any) -> dict[str, Callable[[bytes], bytes]]:
    """What the fork server does: see `router.aside.server`."""
    folder, vocab_size, eos_token_ids = argument
    text = (Path(folder) / "tokenizer.json").read_text(encoding="utf-8")
    return {"check": partial(_check, LLTokenizer(text, vocab_size, eos_token_ids))}


def question_of(question: Question) -> bytes:
    """The question as it is sent. It comes from the router, so it may be pickled."""
    return pickle.dumps(question)


def answer_of(data: bytes) -> Checked | SchemaError:
    """The answer, which is not unpickled: hostile input came near to who wrote it."""
    found = json.loads(data)
    if "rule" not in found:
        return Checked(found["grammar"], tuple(found["dropped"]))
    error = SchemaError(found["rule"], found["pointers"])
    error.field = found["field"]
    return error


def mode_of(chat: api.ChatPrompt) -> api.ToolMode.ValueType | None:
    """How tools may be called; None if they may not."""
    choice = chat.tool_choice
    if not chat.tools or choice.mode == api.TOOL_MODE_NONE:
        return None
    if choice.WhichOneof("choice") == "name":
        return api.TOOL_MODE_REQUIRED
    return choice.mode or api.TOOL_MODE_AUTO


def is_one_call(chat: api.ChatPrompt) -> bool:
    """Whether an answer has one call at most. A tool that is named is called once."""
    return bool(chat.tool_choice.name) or (
        chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls
    )


def _check(tokenizer: LLTokenizer, data: bytes) -> bytes:
    """Runs on a thread with a small stack."""
    found: list[dict[str, Any] | BaseException] = []

    def work() -> None:
        try:
            found.append(_write_checked(tokenizer, pickle.loads(data)))
        except Exception as error:
            found.append(error)

    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not found:
        os._exit(1)  # llguidance has panicked, which is a crash like any other.
    if isinstance(answer := found[0], BaseException):
        raise answer
    return json.dumps(answer).encode()


def _write_checked(tokenizer: LLTokenizer, question: Question) -> dict[str, Any]:
    """The grammar of an answer and the dropped keywords, or the reason why there is none."""
    generation = api.GenerationInput.FromString(question.generation)
    grammar = Grammar(question.special_tokens, question.lead)
    try:
        _write(grammar, generation, question.form, question.thought)
        text = grammar.text()
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise SchemaError("cannot be compiled: it is wrong or too complex")
    except SchemaError as error:
        where = error.field or _field(generation)
        return {"rule": error.rule, "pointers": error.pointers, "field": where}
    return {"grammar": text, "dropped": grammar.dropped}


def _write(
    grammar: Grammar, generation: api.GenerationInput, form: ResponseForm, thought: Thought
) -> None:
    mode = mode_of(generation.chat)
    if form.thinking is not None and (thought.is_open or thought.may_begin):
        grammar.thinking(form.thinking, thought)
    if generation.HasField("structure"):
        grammar.structure(generation.structure)
    if mode is None:
        return
    assert form.calls is not None, "calls without a form are refused before"
    chat = generation.chat
    tools = []
    is_held = mode == api.TOOL_MODE_REQUIRED
    for index, tool in enumerate(chat.tools):
        if chat.tool_choice.name in ("", tool.name):
            try:
                has_schema = tool.parameters and (tool.strict or is_held)
                schema = read(tool.parameters) if has_schema else {}
            except SchemaError as error:
                error.field = f"input.chat.tools[{index}].parameters"
                raise
            tools.append(Tool(index, tool.name, schema, tool.strict))
    rules = CallRules(tools, is_held, several=not is_one_call(chat))
    grammar.calls(form.calls, rules)


def _field(generation: api.GenerationInput) -> str:
    """The field that a refused grammar came from."""
    if (kind := generation.structure.WhichOneof("form")) is None:
        return "input.chat.tools"
    return f"input.structure.{kind}" + ".schema" * (kind == "json_schema")
