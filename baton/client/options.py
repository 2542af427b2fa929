"""Options of a generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from baton.client.generation import ToolCall


class Tool(TypedDict):
    """A function that a model may call."""

    name: str
    description: NotRequired[str]
    parameters: NotRequired[str | Mapping[str, Any]]
    """JSON schema of its arguments; left out if it has none."""
    strict: NotRequired[bool]
    """Whether the arguments are held to the schema."""


class Message(TypedDict):
    """One turn of a chat."""

    role: str
    """"system", "developer", "user", "assistant" or "tool"."""
    content: NotRequired[str | Sequence[str | Mapping[str, str]] | None]
    """The text, or its parts, each a text or `{"type": "text", "text": TEXT}`. Only a turn of the
    assistant's that calls functions may have none."""
    reasoning: NotRequired[str]
    """What the assistant thought before, for templates that want it."""
    tool_calls: NotRequired[Sequence[ToolCall | Mapping[str, Any]]]
    """Calls that the assistant made: those of an earlier result as they are, or as OpenAI's API
    has them."""
    tool_call_id: NotRequired[str]
    """In a tool's turn, the call that it answers."""


class Options(TypedDict, total=False):
    """Options of a generation. The server has defaults for missing ones, and None
    counts as missing."""

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: bool
    omit_text: bool
    min_message_ms: int
    """Least time between two messages with tokens. Those that come sooner share one."""
    choices: int
    beams: int
    """Width of a beam search, which returns the `choices` best that it finds. Not in a stream."""
    length_penalty: float
    """A higher power of the length favours long outputs of a search; 1 if it is not set."""
    early_stopping: str
    """When a search ends: "no_better", "at_once" or "never_better"."""
    best_of: int
    """Draws so many, and returns the `choices` best by mean log probability. Not in a stream."""
    priority: int
    add_special_tokens: bool
    """Whether the model's special tokens surround the prompt: yes for a text, no for messages."""
    client_tag: str
    json_schema: str | Mapping[str, Any]
    """The output is an instance of this JSON schema. Of `json_schema`, `json_object`, `regex`,
    `choice`, `lark` and `gbnf` only one may be given."""
    strict: bool
    """Whether a schema with a keyword that cannot be enforced is refused. Otherwise the keyword is
    dropped, and the result names it."""
    json_object: bool
    """Whether the output is a JSON object."""
    regex: str
    """The whole output matches this regular expression, in the syntax of Rust's `regex`."""
    choice: Sequence[str]
    """The output is one of these texts."""
    lark: str
    """The output follows this grammar, in llguidance's variant of Lark."""
    gbnf: str
    """The output follows this grammar, in llama.cpp's GBNF."""
    tools: Sequence[Tool | Mapping[str, Any]]
    """Functions that the model may call, also as OpenAI's API has them; only with messages."""
    tool_choice: str | Mapping[str, Any]
    """"auto", "none", "required", or the name of the function to call, also as OpenAI's API has
    it."""
    parallel_tool_calls: bool
    """Whether it may make several calls; it may if this is not set."""
    reasoning_effort: str
    thinking_token_budget: int
    """Most tokens to think; then the thinking is ended."""
    message: bool
    """Whether the answer is parsed into reasoning and content. With tools it always is."""
    omit_reasoning: bool
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    skip_special_tokens: bool
    truncate_prompt_tokens: int
    """Keeps only the prompt's last tokens."""
    cache_salt: str
    """Cached pages of prompts are shared only among requests with the same salt."""
    speculation: bool
    """Whether drafts of the output may be verified, where the server's workers do that. It changes
    no token."""
    extensions: Mapping[str, str | bytes]
    """Bytes for hooks of the server's workers, by the hooks' names; a text travels as UTF-8."""
    template_variables: Mapping[str, Any]
    """Variables of the model's chat template, such as `enable_thinking`; only with messages."""
    continue_last: bool
    """Whether the answer continues the last message, which is the assistant's."""
