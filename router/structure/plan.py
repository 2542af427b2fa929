"""Plans the answer to one request: its grammar, its bound on thinking, how to find its parts.

Grammars are written and checked on a thread of their own, with the model's tokenizer and the fuel
that workers have, and the latest ones are kept. A grammar that passes here can be compiled by
workers, and has a first token.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from router import errors
from router.answers.forms import ResponseForm, Thought, thought_of
from router.answers.parser import AnswerParser
from router.errors import Violation
from router.structure.grammar import CallRules, Grammar, Tool
from router.structure.schema import LIMITS, SchemaError, read

if TYPE_CHECKING:
    from router.jobs import ServedModel

KEPT: Final = 64
"""Grammars, and refusals of grammars, that are kept."""
_EFFORT_NAMES: Final = frozenset(("reasoning_effort", "enable_thinking", "thinking"))


class AnswerTokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    form: ResponseForm
    template_names: frozenset[str]

    def special_id(self, text: str) -> int | None:
        """The id of a special token; None if the text is none."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> NDArray[np.uint32]:
        """Ids of a text."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How an answer is made and read."""

    grammar: str = ""
    """In llguidance's own form; empty for any text."""
    dropped: tuple[str, ...] = ()
    """JSON pointers of keywords that the grammar does not enforce."""
    thinking: worker_pb2.ThinkingBudget | None = None
    form: ResponseForm | None = None
    """The form by which parts are found; None: the answer is returned as text."""
    is_message: bool = False
    thinks: bool = False
    """Whether the prompt has begun the thinking."""
    tools: Sequence[tuple[str, str]] = ()
    """Names and schemas of the tools that may be called."""
    one_call: bool = False
    omit_reasoning: bool = False

    def parser(self) -> AnswerParser | None:
        """A parser for one choice; None if the answer has no parts."""
        if self.form is None or self.form.spec is None:
            return None
        return AnswerParser(self.form, thinks=self.thinks, tools=self.tools)


class AnswerPlans:
    """Makes plans. Belongs to the event loop."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="baton-structure")
        self._tokenizers: dict[str, asyncio.Future[LLTokenizer]] = {}
        self._kept: OrderedDict[bytes, tuple[str, tuple[str, ...]] | SchemaError] = OrderedDict()

    def close(self) -> None:
        """Ends the threads after their current work."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def plan(
        self,
        generation: api.GenerationInput,
        model: ServedModel,
        tokenizer: AnswerTokenizer | None,
        prompt: str,
    ) -> AnswerPlan:
        """The plan of the answer to a prompt.

        Raises:
            RouterError: INVALID_FIELD. The form cannot be enforced, or the model has none for it.
        """
        has_chat = generation.WhichOneof("prompt") == "chat"
        if tokenizer is None or not (has_chat or generation.HasField("structure")):
            return AnswerPlan()
        chat = generation.chat
        mode = _mode(chat)
        form = tokenizer.form if mode is not None else tokenizer.form.without_calls()
        if found := list(_refusals(generation, tokenizer, mode)):
            raise errors.invalid_fields(found)
        thought = Thought()
        if has_chat:
            thought = thought_of(form, prompt, continues=chat.continue_last)
        is_message = has_chat and (generation.output.message or mode is not None)
        plan = AnswerPlan(
            thinking=_budget(chat, form, thought, tokenizer),
            form=form if is_message else None,
            is_message=is_message,
            thinks=thought.is_open,
            tools=[(tool.name, tool.parameters) for tool in chat.tools] if mode else (),
            one_call=chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls,
            omit_reasoning=generation.output.omit_reasoning,
        )
        if not _wants_grammar(generation, mode):
            return plan
        if generation.stop.ignore_eos:
            raise errors.invalid_fields(
                [Violation("input.stop.ignore_eos", "cannot stand beside strict or required tools")]
            )
        grammar, dropped = await self._grammar(generation, model, tokenizer, form, thought)
        return replace(plan, grammar=grammar, dropped=dropped)

    async def _grammar(
        self,
        generation: api.GenerationInput,
        model: ServedModel,
        tokenizer: AnswerTokenizer,
        form: ResponseForm,
        thought: Thought,
    ) -> tuple[str, tuple[str, ...]]:
        key = _key(generation, model, thought)
        known = self._kept.get(key)
        if known is not None:
            self._kept.move_to_end(key)
        else:
            loop = asyncio.get_running_loop()
            checker = await self._tokenizer(model)
            known = await loop.run_in_executor(
                self._pool, _write_checked, generation, tokenizer, form, thought, checker
            )
            self._kept[key] = known
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if isinstance(known, SchemaError):
            raise errors.invalid_fields([Violation(known.field, known.rule)])
        return known

    async def _tokenizer(self, model: ServedModel) -> LLTokenizer:
        load = self._tokenizers.get(model.path)
        if load is None or (load.done() and (load.cancelled() or load.exception())):
            loop = asyncio.get_running_loop()
            load = loop.run_in_executor(self._pool, _read_tokenizer, model)
            self._tokenizers[model.path] = load
        # Shielded: a caller that gives up must not cancel the load for other waiting callers.
        return await asyncio.shield(load)


def _mode(chat: api.ChatPrompt) -> api.ToolMode.ValueType | None:
    """How tools may be called; None if they may not."""
    choice = chat.tool_choice
    if not chat.tools or choice.mode == api.TOOL_MODE_NONE:
        return None
    if choice.WhichOneof("choice") == "name":
        return api.TOOL_MODE_REQUIRED
    return choice.mode or api.TOOL_MODE_AUTO


def _refusals(
    generation: api.GenerationInput,
    tokenizer: AnswerTokenizer,
    mode: api.ToolMode.ValueType | None,
) -> list[Violation]:
    """Violations: what the model has no form for."""
    chat, form, found = generation.chat, tokenizer.form, []
    if mode is not None:
        if not form.reads_calls:
            rule = "the form in which this model calls functions is not known"
            found.append(Violation("input.chat.tools", rule))
        elif form.calls is None and _wants_grammar(generation, mode):
            rule = "this model's calls can be read, but not demanded or held to a schema"
            found.append(Violation("input.chat.tool_choice", rule))
    if chat.reasoning_effort not in ("", "none") and not (_EFFORT_NAMES & tokenizer.template_names):
        rule = "the model's chat template knows no effort of reasoning"
        found.append(Violation("input.chat.reasoning_effort", rule))
    if chat.HasField("thinking_token_budget") and form.thinking is None:
        rule = "the model's chat template has no thinking"
        found.append(Violation("input.chat.thinking_token_budget", rule))
    return found


def _wants_grammar(generation: api.GenerationInput, mode: api.ToolMode.ValueType | None) -> bool:
    if generation.HasField("structure") or mode == api.TOOL_MODE_REQUIRED:
        return True
    return mode is not None and any(tool.strict for tool in generation.chat.tools)


def _budget(
    chat: api.ChatPrompt, form: ResponseForm, thought: Thought, tokenizer: AnswerTokenizer
) -> worker_pb2.ThinkingBudget | None:
    if not chat.HasField("thinking_token_budget") or form.thinking is None:
        return None
    if not (thought.is_open or thought.may_begin):
        return None
    begin = b"" if thought.is_open else _packed(tokenizer, form.thinking.begin)
    return worker_pb2.ThinkingBudget(
        tokens=chat.thinking_token_budget,
        begin_ids=begin,
        end_ids=_packed(tokenizer, form.thinking.end),
    )


def _packed(tokenizer: AnswerTokenizer, text: str) -> bytes:
    return tokenizer.encode(text, add_special_tokens=False).astype("<u4").tobytes()


def _key(generation: api.GenerationInput, model: ServedModel, thought: Thought) -> bytes:
    """A digest of everything that a grammar is made of."""
    chat = api.ChatPrompt(
        tools=generation.chat.tools,
        tool_choice=generation.chat.tool_choice,
        parallel_tool_calls=generation.chat.parallel_tool_calls,
    )
    parts = (model.path, model.revision, repr(thought))
    data = [one.encode() for one in parts]
    data += [one.SerializeToString(deterministic=True) for one in (generation.structure, chat)]
    return hashlib.sha256(b"".join(b"%d:%b" % (len(one), one) for one in data)).digest()


def _read_tokenizer(model: ServedModel) -> LLTokenizer:
    text = (Path(model.path) / "tokenizer.json").read_text(encoding="utf-8")
    return LLTokenizer(text, model.vocab_size, list(model.eos_token_ids))


def _write_checked(
    generation: api.GenerationInput,
    tokenizer: AnswerTokenizer,
    form: ResponseForm,
    thought: Thought,
    checker: LLTokenizer,
) -> tuple[str, tuple[str, ...]] | SchemaError:
    """The grammar of an answer and the dropped keywords, or the reason why there is none."""
    grammar = Grammar(tokenizer.special_id)
    try:
        _write(grammar, generation, form, thought)
        text = grammar.text()
        matcher = LLMatcher(checker, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise SchemaError("cannot be compiled: it is wrong or too complex")
    except SchemaError as error:
        error.field = error.field or _field(generation)
        return error
    return text, tuple(grammar.dropped)


def _write(
    grammar: Grammar, generation: api.GenerationInput, form: ResponseForm, thought: Thought
) -> None:
    mode = _mode(generation.chat)
    if form.thinking is not None and (thought.is_open or thought.may_begin):
        grammar.thinking(form.thinking, thought)
    if generation.HasField("structure"):
        grammar.structure(generation.structure)
    if mode is None:
        return
    assert form.calls is not None, "calls without a form are refused before"
    chat = generation.chat
    several = not chat.HasField("parallel_tool_calls") or chat.parallel_tool_calls
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
    rules = CallRules(tools, is_held, several)
    grammar.calls(form.calls, rules)


def _field(generation: api.GenerationInput) -> str:
    """The field that a refused grammar came from."""
    if (kind := generation.structure.WhichOneof("form")) is None:
        return "input.chat.tools"
    return f"input.structure.{kind}" + ".schema" * (kind == "json_schema")
