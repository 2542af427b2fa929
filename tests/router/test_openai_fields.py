"""No field of OpenAI's API or of vLLM's server that changes an answer is ignored in silence."""

from __future__ import annotations

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses
from pydantic import BaseModel

from router.doors.openai.schema import HARMLESS, CompletionRequest, GenerationRequest
from router.doors.openai.turns import ChatRequest
from router.doors.responses.schema import ResponseRequest

VLLM = """
    add_special_tokens allowed_token_ids bad_words cache_salt echo frequency_penalty ignore_eos
    include_stop_str_in_output kv_transfer_params length_penalty logit_bias logits_processors
    logprob_token_ids logprobs max_repetition_pattern_size max_tokens min_p
    min_repetition_pattern_size min_tokens model n presence_penalty priority prompt_logprobs
    repetition_detection repetition_min_count repetition_penalty request_id response_format
    return_token_ids return_tokens_as_token_ids seed skip_special_tokens
    spaces_between_special_tokens stop stop_token_ids stream stream_options structured_outputs
    temperature top_k top_p truncate_prompt_tokens use_beam_search user vllm_xargs
    guided_choice guided_grammar guided_json guided_regex guided_whitespace_pattern
"""
"""What vLLM's server reads in requests of both methods (2026-11, and older names)."""
VLLM_COMPLETIONS = "prompt prompt_embeds suffix best_of"
VLLM_CHAT = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
    include_reasoning max_completion_tokens messages mm_processor_kwargs parallel_tool_calls
    reasoning_effort thinking_token_budget tool_choice tools top_logprobs
"""
SGLANG = """
    custom_logit_processor ebnf json_schema lora_path regex stop_regex typical_p xtc_probability
    xtc_threshold dry_multiplier dry_base dry_allowed_length dry_sequence_breakers
"""
"""SGLang's and llama.cpp's own."""


def known(kind: type[BaseModel]) -> set[str]:
    return {info.alias or name for name, info in kind.model_fields.items()} | HARMLESS


@pytest.mark.parametrize(
    ("kind", "theirs"),
    [
        (CompletionRequest, completions.CompletionCreateParamsBase),
        (ChatRequest, chat.CompletionCreateParamsBase),
        (ResponseRequest, responses.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_openais_api_is_known(
    kind: type[GenerationRequest], theirs: type[dict[str, object]]
) -> None:
    assert not set(theirs.__annotations__) - known(kind)


@pytest.mark.parametrize(
    ("kind", "own"), [(CompletionRequest, VLLM_COMPLETIONS), (ChatRequest, VLLM_CHAT)]
)
def test_every_field_of_other_servers_is_known(kind: type[GenerationRequest], own: str) -> None:
    assert not {*VLLM.split(), *SGLANG.split(), *own.split()} - known(kind)


def test_fields_of_the_other_method_are_refused() -> None:
    """A field of a chat that is set on /completions is not ignored, and the other way round."""
    assert not set(ChatRequest.model_fields) - known(CompletionRequest)
    assert not set(CompletionRequest.model_fields) - known(ChatRequest)
    chats = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": 1}}
    context = {"most_ids": 9}
    given = CompletionRequest.model_validate({"prompt": "a", **chats}, context=context)
    assert {one.field for one in given.refused()} == set(chats)
    texts = {"prompt": "a", "suffix": "b", "best_of": 2}
    asked = ChatRequest.model_validate({**chats, **texts}, context=context)
    assert {one.field for one in asked.refused()} == set(texts)
