from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from frontdoor_kit import served_model
from openai.types.shared import ReasoningEffort

from baton.inference.v1 import inference_pb2 as api
from baton.worker.v1 import worker_pb2
from router.errors import RouterError, Violation
from router.requests import filling, validation
from router.requests.validation import Limits

LIMITS = Limits(default_max_tokens=20, max_output_tokens=48, max_choices=4)
MODEL = served_model("/nowhere")
NAN, INF = math.nan, math.inf


def request(**fields: object) -> api.GenerateRequest:
    prompt = api.GenerationInput(token_ids=api.TokenIds(ids=[70, 71, 72]))
    for name, value in fields.items():
        getattr(prompt, name).CopyFrom(value)
    return api.GenerateRequest(input=prompt)


def violations(message: api.GenerateRequest) -> list[Violation]:
    found = validation.check_request(message, LIMITS)
    validation.check_against_model(found, message.input, MODEL)
    return found.found


def paths(message: api.GenerateRequest) -> list[str]:
    return [violation.field for violation in violations(message)]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 1, 100], [-0.1, NAN, INF]),
        ("top_p", [0.01, 1], [0, -1, 1.1, NAN]),
        ("min_p", [0, 1], [-0.1, 1.1, NAN]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, NAN, -INF]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, NAN]),
        ("repetition_penalty", [0.1, 1, 9], [0, -1, NAN, INF]),
        ("top_k", [0, 1, 2**32 - 1], []),
        ("seed", [0, 2**64 - 1], []),
    ],
)
def test_sampling_ranges(name: str, good: list[float], bad: list[float]) -> None:
    def ask(value: float) -> list[str]:
        return paths(request(sampling=api.SamplingOptions(**{name: value})))

    assert [ask(value) for value in good] == [[]] * len(good)
    assert [ask(value) for value in bad] == [[f"input.sampling.{name}"]] * len(bad)


def turns(role: api.Role.ValueType, **chat: object) -> api.ChatPrompt:
    prompt = api.ChatPrompt(messages=[api.ChatMessage(role=role)], **chat)
    prompt.template_variables.update({"enable_thinking": False})
    return prompt


def test_only_the_assistant_is_continued() -> None:
    assert paths(request(chat=turns(api.ROLE_ASSISTANT, continue_last=True))) == []
    asked = request(chat=turns(api.ROLE_USER, continue_last=True))
    assert paths(asked) == ["input.chat.continue_last"]


def test_variables_that_the_server_sets() -> None:
    chat = turns(api.ROLE_USER)
    chat.template_variables.update({"tools": None, "add_generation_prompt": False})
    path = "input.chat.template_variables"
    assert paths(request(chat=chat)) == [f"{path}.add_generation_prompt", f"{path}.tools"]


@pytest.mark.parametrize("number", [NAN, INF])
def test_variables_hold_numbers_that_json_has(number: float) -> None:
    """As 1e400 is read. A template that cannot have them blamed the turns."""
    chat = turns(api.ROLE_USER)
    chat.template_variables.update({"deep": [{"a": number}], "flat": number, "other": [1e300]})
    path = "input.chat.template_variables"
    assert sorted(paths(request(chat=chat))) == [f"{path}.deep", f"{path}.flat"]


@pytest.mark.parametrize("effort", [*get_args(get_args(ReasoningEffort)[0]), ""])
def test_every_effort_of_openais_api_is_known(effort: str) -> None:
    assert paths(request(chat=turns(api.ROLE_USER, reasoning_effort=effort))) == []


BROKEN: list[tuple[Callable[[api.GenerateRequest], object], str]] = [
    (lambda one: one.input.Clear(), "input"),
    (lambda one: one.input.token_ids.Clear(), "input.token_ids.ids"),
    (lambda one: one.input.token_ids.ids.append(512), "input.token_ids.ids[3]"),
    (lambda one: setattr(one.input, "text", ""), "input.text"),
    (lambda one: one.input.chat.SetInParent(), "input.chat.messages"),
    (lambda one: one.input.chat.messages.add(), "input.chat.messages[0].role"),
    (lambda one: one.input.chat.messages.add(role=9), "input.chat.messages[0].role"),
    (lambda one: setattr(one.input, "choices", 0), "input.choices"),
    (lambda one: setattr(one.input, "choices", 5), "input.choices"),
    (lambda one: setattr(one.input, "priority", -101), "input.priority"),
    (lambda one: setattr(one.input, "priority", 101), "input.priority"),
    (lambda one: setattr(one, "client_tag", "é" * 65), "client_tag"),
    (lambda one: setattr(one.input.stop, "max_tokens", 0), "input.stop.max_tokens"),
    (lambda one: setattr(one.input.stop, "max_tokens", 49), "input.stop.max_tokens"),
    (lambda one: one.input.stop.sequences.append(""), "input.stop.sequences[0]"),
    (lambda one: one.input.stop.sequences.extend(["é" * 129]), "input.stop.sequences[0]"),
    (lambda one: one.input.stop.sequences.extend("a" * 17), "input.stop.sequences"),
    (lambda one: one.input.stop.token_ids.append(512), "input.stop.token_ids[0]"),
    (lambda one: one.input.sampling.logit_bias.update({7: NAN}), "input.sampling.logit_bias[7]"),
    (lambda one: one.input.sampling.logit_bias.update({7: 101}), "input.sampling.logit_bias[7]"),
    (
        lambda one: one.input.sampling.logit_bias.update({512: 1}),
        "input.sampling.logit_bias[512]",
    ),
    (lambda one: setattr(one.input.output, "top_logprobs", 1), "input.output.top_logprobs"),
]


@pytest.mark.parametrize(("mutate", "path"), BROKEN, ids=[path for _, path in BROKEN])
def test_one_broken_rule(mutate: Callable[[api.GenerateRequest], object], path: str) -> None:
    message = request()
    assert paths(message) == []
    mutate(message)
    assert paths(message) == [path]
    (violation,) = violations(message)
    assert re.search(r"\bmust\b|^needs ", violation.description), (
        "what is wanted, not what is wrong"
    )


def test_all_broken_rules_at_once() -> None:
    message = request(
        sampling=api.SamplingOptions(temperature=-1, top_p=2, logit_bias={600: 500}),
        output=api.OutputOptions(logprobs=True, top_logprobs=21),
        stop=api.StopOptions(max_tokens=0, sequences=[""], token_ids=[999]),
    )
    message.input.token_ids.ids.append(4000)
    assert sorted(paths(message)) == [
        "input.output.top_logprobs",
        "input.sampling.logit_bias[600]",
        "input.sampling.logit_bias[600]",
        "input.sampling.temperature",
        "input.sampling.top_p",
        "input.stop.max_tokens",
        "input.stop.sequences[0]",
        "input.stop.token_ids[0]",
        "input.token_ids.ids[3]",
    ]


def test_a_prompt_of_foreign_ids_names_a_few() -> None:
    message = request()
    message.input.token_ids.ids[:] = range(512, 560)
    assert paths(message) == [f"input.token_ids.ids[{index}]" for index in range(8)]


def test_sampling_defaults() -> None:
    filled = filling.fill_sampling(api.GenerationInput(), MODEL)
    assert (filled.temperature, filled.top_p, filled.repetition_penalty) == (1, 1, 1)
    assert (filled.top_k, filled.min_p, filled.frequency_penalty) == (0, 0, 0)
    assert not filled.HasField("top_logprobs")
    again = filling.fill_sampling(api.GenerationInput(), MODEL)
    assert filled.seed != again.seed


def test_a_token_that_the_model_has_not_is_refused() -> None:
    text, chat = api.GenerationInput(text="a"), api.GenerationInput(chat=api.ChatPrompt())
    for generation, path in ((text, "input.text"), (chat, "input.chat.messages")):
        validation.check_encoded(generation, np.array([3, 511], np.uint32), MODEL)
        with pytest.raises(RouterError, match=f"{path}: holds a special token"):
            validation.check_encoded(generation, np.array([512, 3], np.uint32), MODEL)


def test_a_models_own_defaults_hold_where_a_request_is_silent() -> None:
    given = {"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25}
    model = replace(MODEL, sampling=worker_pb2.SamplingDefaults(**given))
    some = api.GenerationInput(sampling=api.SamplingOptions(top_p=0.5))
    filled = filling.fill_sampling(some, model)
    assert (filled.temperature, filled.top_p, filled.top_k, filled.min_p) == (0.5, 0.5, 7, 0.25)
    assert filled.repetition_penalty == 1
    zeros = api.SamplingOptions(temperature=0, top_k=0, min_p=0, repetition_penalty=2)
    filled = filling.fill_sampling(api.GenerationInput(sampling=zeros), model)
    assert (filled.temperature, filled.top_k, filled.min_p) == (0, 0, 0)
    assert (filled.top_p, filled.repetition_penalty) == (0.75, 2)


def test_zeros_are_values() -> None:
    sampling = api.SamplingOptions(temperature=0, seed=0, top_k=512, logit_bias={3: -1.5})
    output = api.OutputOptions(logprobs=True)
    filled = filling.fill_sampling(api.GenerationInput(sampling=sampling, output=output), MODEL)
    assert (filled.temperature, filled.seed) == (0, 0)
    assert filled.top_k == 0, "the whole vocabulary is no restriction"
    assert filled.HasField("top_logprobs")
    assert dict(filled.logit_bias) == {3: -1.5}


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "given"),
    [(10, None, 20), (60, None, 4), (63, None, 1), (10, 30, 30), (60, 4, 4)],
)
def test_max_tokens(prompt_tokens: int, asked: int | None, given: int) -> None:
    stop = api.StopOptions(max_tokens=asked, min_tokens=1, token_ids=[5], ignore_eos=True)
    filled = filling.fill_stopping(stop, prompt_tokens, MODEL, LIMITS)
    assert filled.max_tokens == given
    assert (filled.min_tokens, list(filled.token_ids), filled.ignore_eos) == (1, [5], True)


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "field"),
    [(60, 5, "input.stop.max_tokens"), (64, None, "input"), (900, 1, "input")],
)
def test_the_context_bounds_prompt_and_output(
    prompt_tokens: int, asked: int | None, field: str
) -> None:
    with pytest.raises(RouterError) as caught:
        filling.fill_stopping(api.StopOptions(max_tokens=asked), prompt_tokens, MODEL, LIMITS)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.metadata["prompt_tokens"] == str(prompt_tokens)


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    with pytest.raises(RouterError) as caught:
        filling.fill_stopping(api.StopOptions(min_tokens=21), 10, MODEL, LIMITS)
    assert [one.field for one in caught.value.violations] == ["input.stop.min_tokens"]


@pytest.mark.parametrize(
    ("message", "field", "caps"),
    [
        ("StopOptions", "sequences", [validation.MAX_STOP_TEXTS, validation.MAX_STOP_TEXT_BYTES]),
        ("StopOptions", "token_ids", [validation.MAX_STOP_TOKENS]),
        ("StopOptions", "max_tokens", [Limits().default_max_tokens]),
        ("SamplingOptions", "logit_bias", [validation.MAX_LOGIT_BIASES, validation.MAX_LOGIT_BIAS]),
        ("OutputOptions", "top_logprobs", [validation.MAX_TOP_LOGPROBS]),
        ("GenerationInput", "choices", [Limits().max_choices]),
        ("GenerationInput", "priority", [validation.MAX_PRIORITY]),
        ("GenerateRequest", "client_tag", [validation.MAX_CLIENT_TAG_BYTES]),
        ("StreamGenerateRequest", "client_tag", [validation.MAX_CLIENT_TAG_BYTES]),
    ],
)
def test_the_proto_says_what_is_enforced(message: str, field: str, caps: list[float]) -> None:
    assert {f"{round(cap):,}" for cap in caps} <= numbers(message, field)


def numbers(message: str, field: str) -> set[str]:
    """Numbers in the comment above a field of `inference.proto`."""
    proto = Path(__file__).parents[2] / "protos" / "baton" / "inference" / "v1" / "inference.proto"
    body = proto.read_text().split(f"message {message} {{\n", 1)[1].split("\n}", 1)[0]
    comment: list[str] = []
    for line in map(str.strip, body.splitlines()):
        if line.startswith("//"):
            comment.append(line)
        elif f" {field} = " in line:
            return set(re.findall(r"\d[\d,]*", " ".join(comment).replace(", ", " ")))
        else:
            comment.clear()
    raise AssertionError(f"no {message}.{field}")
