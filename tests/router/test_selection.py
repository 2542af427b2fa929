"""How the choices that are returned are chosen: bounds, refusals by name, and best_of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from frontdoor_kit import served_model

from baton.inference.v1 import inference_pb2 as api
from engine.beams.params import BeamParams
from router.jobs import TokenScore
from router.requests import selecting, validation
from router.requests.outputs import Finished, Output, TextDelta
from router.requests.validation import Limits

IDS = api.TokenIds(ids=[70, 71, 72])
SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "frequency_penalty": 1,
    "presence_penalty": 1, "repetition_penalty": 1.2, "logit_bias": {3: 1.0},
    "allowed_token_ids": [3], "bad_words": ["a"],
}  # fmt: skip


def refused(kind: type = api.GenerateRequest, **fields: Any) -> list[str]:
    prompt = {} if "chat" in fields else {"token_ids": IDS}
    message = kind(input=api.GenerationInput(**prompt, **fields))
    found = validation.check_request(message, Limits(max_choices=8))
    validation.check_against_model(found, message.input, served_model("/nowhere"))
    return [one.field.removeprefix("input.") for one in found.found]


def beams(width: int = 4, **more: Any) -> dict[str, Any]:
    return {"beams": api.BeamSearch(width=width, **more)}


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (beams(1), []),
        (beams(8, length_penalty=-5.0, early_stopping=api.EARLY_STOPPING_NEVER_BETTER), []),
        (beams(4) | {"choices": 4, "sampling": api.SamplingOptions(temperature=0, top_p=1)}, []),
        (beams(0), ["beams.width"]),
        (beams(9), ["beams.width"]),
        (beams(2**32 - 1), ["beams.width", "beams.width"]),
        (beams(3) | {"choices": 4}, ["beams.width"]),
        (beams(2, length_penalty=5.1), ["beams.length_penalty"]),
        (beams(2, length_penalty=math.nan), ["beams.length_penalty"]),
        (beams(2, early_stopping=7), ["beams.early_stopping"]),
        (beams(2) | {"best_of": 2}, ["best_of"]),
        (beams(2) | {"stop": api.StopOptions(token_ids=range(9))}, ["stop.token_ids"]),
        (beams(2) | {"stop": api.StopOptions(token_ids=range(8))}, []),
        (beams(2) | {"stop": api.StopOptions(sequences=["a"])}, ["stop.sequences"]),
        (beams(2) | {"structure": api.Structure(regex="a")}, ["structure"]),
        (
            beams(2) | {"chat": api.ChatPrompt(
                messages=[api.ChatMessage(role=api.ROLE_USER, content="a")],
                tools=[api.Tool(name="f")], thinking_token_budget=3,
            )},
            ["chat.tools", "chat.thinking_token_budget"],
        ),
        *((beams(2) | {"sampling": api.SamplingOptions(**{name: value})}, [f"sampling.{name}"])
          for name, value in SAMPLING.items()),
        ({"best_of": 8, "choices": 8}, []),
        ({"best_of": 9}, ["best_of"]),
        ({"best_of": 2, "choices": 3}, ["best_of"]),
        ({"best_of": 0}, ["best_of"]),
    ],
)  # fmt: skip
def test_bounds_and_what_does_not_go_together(fields: dict[str, Any], wrong: list[str]) -> None:
    assert refused(**fields) == wrong


@pytest.mark.parametrize(
    ("width", "stop", "candidates"),
    [
        (220, {}, 440), (221, {}, 442), (219, {"min_tokens": 3}, 439),
        (220, {"min_tokens": 3}, 441),
        (146, {"token_ids": [3]}, 438), (147, {"token_ids": [3]}, 441),
        (147, {"token_ids": [3], "ignore_eos": True}, 294), (600, {}, 1200),
    ],
)  # fmt: skip
def test_a_search_that_no_hand_off_has_room_for_is_refused(
    width: int, stop: dict[str, Any], candidates: int
) -> None:
    """Before anything is computed, with the number; the engine reads as many."""
    generation = api.GenerationInput(**beams(width), stop=api.StopOptions(**stop))
    found, model = validation.Violations(), served_model("/nowhere")
    validation.check_against_model(found, generation, replace(model, vocab_size=1000))
    ends = len({*stop.get("token_ids", ()), *(() if "ignore_eos" in stop else (2,))})
    assert BeamParams(width).read(ends, stop.get("min_tokens", 0)) == candidates
    rules = [one.description for one in found.found]
    assert len(rules) == (candidates > selecting.MAX_BEAM_CANDIDATES)
    if rules:
        assert rules[0].startswith(f"looks at {candidates} candidates: ")
        assert rules[0].endswith(" 440")


def test_what_is_chosen_at_the_end_has_no_stream() -> None:
    assert refused(api.StreamGenerateRequest, **beams(2)) == ["beams"]
    assert refused(api.StreamGenerateRequest, best_of=2) == ["best_of"]
    assert refused(api.StreamGenerateRequest, best_of=2, choices=2) == []


class Sink:
    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.put = self.outputs.append


@pytest.mark.parametrize("with_logprobs", [False, True])
def test_the_best_by_mean_log_probability_are_returned(with_logprobs: bool) -> None:
    """Not by the sum, which favours short ones."""
    generation = api.GenerationInput(choices=2, best_of=3)
    generation.output.logprobs = with_logprobs
    sink = Sink()
    selection = selecting.Selection(generation, sink)  # type: ignore[arg-type]
    scores = {0: [-1.0], 1: [-0.5, -0.75, -0.25], 2: [-0.5, -1.0]}
    for choice, logprobs in scores.items():
        tokens = [7 + choice] * len(logprobs)
        delta = TextDelta(choice, 0, tokens, ["a"], [TokenScore(one) for one in logprobs])
        selection.put(delta)
    for choice in (2, 0):
        selection.put(Finished(choice, api.FINISH_REASON_LENGTH))
    assert sink.outputs == []
    usage = api.Usage(output_tokens=6)
    selection.put(Finished(1, api.FINISH_REASON_STOP, "x", usage))
    deltas = [one for one in sink.outputs if isinstance(one, TextDelta)]
    ends = [one for one in sink.outputs if isinstance(one, Finished)]
    assert [(one.choice, one.token_ids) for one in deltas] == [(0, [8, 8, 8]), (1, [9, 9])]
    assert [len(one.logprobs) for one in deltas] == ([3, 2] if with_logprobs else [0, 0])
    assert [(end.choice, end.score, end.usage) for end in ends] == [
        (0, -0.5, None),
        (1, -0.75, usage),
    ]
    assert ends[0].stop_text == "x"
