"""Plans the answer to one request: its grammar, its bound on thinking, how to find its parts.

Grammars are written and checked by processes aside (`router.structure.grammars`), with the model's
tokenizer and the fuel that workers have. A grammar that passes there can be compiled by workers,
and has a first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from router import errors
from router.answers.forms import EFFORT, THINKING_SWITCHES, ResponseForm, Thought, thought_of
from router.answers.parser import AnswerParser
from router.errors import Violation
from router.structure.checking import Question, is_one_call, mode_of
from router.structure.grammars import Grammars

if TYPE_CHECKING:
    from router.jobs import ServedModel

_SWITCHES: Final = frozenset(THINKING_SWITCHES)
_EFFORT_NAMES: Final = _SWITCHES | {EFFORT}


class AnswerTokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    form: ResponseForm
    template_names: frozenset[str]
    special_token_ids: dict[str, int]

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
    ignored: tuple[str, ...] = ()
    """Fields that the chat template does not read."""
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

    def __init__(self) -> None:
        self.grammars = Grammars()

    def close(self) -> None:
        """Ends the processes."""
        self.grammars.close()

    async def plan(
        self,
        generation: api.GenerationInput,
        model: ServedModel,
        tokenizer: AnswerTokenizer | None,
        prompt: str,
        caller: str,
    ) -> AnswerPlan:
        """The plan of the answer to a prompt. `caller` waits for its turn where many ask.

        Raises:
            RouterError: INVALID_FIELD. The form cannot be enforced, or the model has none for it.
                STRUCTURE_TOO_COMPLEX.
        """
        has_chat = generation.WhichOneof("prompt") == "chat"
        if tokenizer is None or not (has_chat or generation.HasField("structure")):
            return AnswerPlan()
        chat = generation.chat
        mode = mode_of(chat)
        form = tokenizer.form if mode is not None else tokenizer.form.without_calls()
        if found := list(_refusals(generation, tokenizer, mode)):
            raise errors.invalid_fields(found)
        thought = Thought()
        if has_chat:
            thought = thought_of(form, prompt, continues=chat.continue_last)
        is_message = has_chat and (generation.output.message or mode is not None)
        plan = AnswerPlan(
            ignored=tuple(_ignored(chat, tokenizer)) if has_chat else (),
            thinking=_budget(chat, form, thought, tokenizer),
            form=form if is_message else None,
            is_message=is_message,
            thinks=thought.is_open,
            tools=[(tool.name, tool.parameters) for tool in chat.tools] if mode else (),
            one_call=is_one_call(chat),
            omit_reasoning=generation.output.omit_reasoning,
        )
        if not _wants_grammar(generation, mode):
            return plan
        if generation.stop.ignore_eos:
            raise errors.invalid_fields(
                [Violation("input.stop.ignore_eos", "cannot stand beside strict or required tools")]
            )
        lead = form.lead if is_message else ""
        question = _question(generation, tokenizer, form, thought, lead)
        checked = await self.grammars.grammar(question, model, caller)
        return replace(plan, grammar=checked.grammar, dropped=checked.dropped)


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
    if chat.HasField("thinking_token_budget") and form.thinking is None:
        rule = "the model's chat template has no thinking"
        found.append(Violation("input.chat.thinking_token_budget", rule))
    return found


def _ignored(chat: api.ChatPrompt, tokenizer: AnswerTokenizer) -> Iterator[str]:
    """The fields that the chat template does not read. To turn thinking off takes nothing where
    there is none. All switches together are one wish: one that is read fulfils it."""
    neutral = ("",) if tokenizer.form.thinking is not None else ("", "none")
    if chat.reasoning_effort not in neutral and not _EFFORT_NAMES & tokenizer.template_names:
        yield "input.chat.reasoning_effort"
    unread = chat.template_variables.fields.keys() - tokenizer.template_names
    if chat.template_variables.fields.keys() >= _SWITCHES and not unread >= _SWITCHES:
        unread -= _SWITCHES
    for name in sorted(unread):
        yield f"input.chat.template_variables.{name}"


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


def _question(
    generation: api.GenerationInput,
    tokenizer: AnswerTokenizer,
    form: ResponseForm,
    thought: Thought,
    lead: str,
) -> Question:
    chat, slim = generation.chat, api.GenerationInput()
    if generation.HasField("structure"):
        slim.structure.CopyFrom(generation.structure)
    slim.chat.tools.extend(chat.tools)
    slim.chat.tool_choice.CopyFrom(chat.tool_choice)
    if chat.HasField("parallel_tool_calls"):
        slim.chat.parallel_tool_calls = chat.parallel_tool_calls
    data = slim.SerializeToString(deterministic=True)
    return Question(data, form, thought, tokenizer.special_token_ids, lead)
