"""A stream, joined, is what the whole answer is: text, calls, reasons, scores, ids, counts."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai_kit import open_port, score
from pydantic_core import from_json
from tool_templates import THINKING

from baton.worker.v1 import worker_pb2
from router.jobs import ChoiceEnded, Job, JobEvent, JobFinished, JobStarted, JobTokens

CASES = 12
TURNS_OF_THE_LOOP = 30
"""More than a token takes on its way to the client; see `test_short_way`."""
AT_ONCE = 5
"""Messages of so many tokens follow each other in one turn, and are merged."""
HELLO = [{"role": "user", "content": "Hello"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "é🎉"}}\n</tool_call>'
PIECES = [
    "The fox ",
    "é🎉",
    "<think>",
    "</think>",
    "\n",
    '"\\',
    " jumps",
    "stop",
    "st",
    "日本",
    CALL,
]
TOOL = {"name": "f", "parameters": {"type": "object"}}
MORE: dict[str, list[Any]] = {
    "stop": [["stop"], ["fox j", "é"], "本", ["<|im_end|>"]],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [list(range(0, 300, 7))],
    "skip_special_tokens": [False, True],
    "min_tokens": [1, 3],
}
OF_CHOICES = {"n": [2, 3], "return_token_ids": [True], "return_tokens_as_token_ids": [True]}
FIELDS: dict[str, tuple[dict[str, Any], dict[str, list[Any]]]] = {
    "/v1/completions": (
        {"prompt": "The <|im_end|>é", "max_tokens": 99},
        {**MORE, **OF_CHOICES, "logprobs": [0, 2], "echo": [True], "prompt": [["a", [70, 71]]]},
    ),
    "/v1/chat/completions": (
        {"messages": HELLO},
        {**MORE, **OF_CHOICES, "logprobs": [True]}
        | {"tools": [[{"type": "function", "function": TOOL}]]}
        | {"include_reasoning": [False], "parallel_tool_calls": [False]},
    ),
    "/v1/responses": ({"input": "Hello"}, {**MORE, "tools": [[{"type": "function", **TOOL}]]}),
    "/v1/messages": (
        {"messages": HELLO, "max_tokens": 99},
        {"stop_sequences": MORE["stop"][:2], "tools": [[{"name": "f"}]]}
        | {"thinking": [{"type": "enabled"}, {"type": "adaptive", "display": "omitted"}]},
    ),
}  # fmt: skip


def script_of(outputs: list[list[int]], sizes: list[int]) -> Callable[[Job], Any]:
    """Outputs of choices, in messages of these sizes, in turns."""

    async def script(job: Job) -> AsyncGenerator[JobEvent, None]:
        scores = tuple(score(job, one) for one in job.prompt_ids[1:].tolist())
        yield JobStarted(
            cached_prompt_tokens=1, prompt_logprobs=scores if job.prompt_logprobs else ()
        )
        places = [0] * job.choices
        for turn in range(max(map(len, outputs), default=0)):
            size = sizes[turn % len(sizes)]
            for choice in range(job.choices):
                at = places[choice]
                if ids := outputs[choice][at : at + size]:
                    scored = job.sampling.HasField("top_logprobs")
                    records = tuple(score(job, one) for one in ids) if scored else ()
                    yield JobTokens(choice, at, tuple(ids), records)
                    places[choice] += len(ids)
            for _ in range(TURNS_OF_THE_LOOP if size < AT_ONCE else 0):
                await asyncio.sleep(0)
        for choice, output in enumerate(outputs[: job.choices]):
            yield ChoiceEnded(choice, worker_pb2.END_REASON_END_OF_SEQUENCE, len(output))
        yield JobFinished(cached_prompt_tokens=1)

    return script


def add(whole: Any, part: Any) -> Any:
    """Joins texts and lists, and the fields of objects; other values are those of the last."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return {**whole, **{name: add(whole.get(name), one) for name, one in part.items()}}
    if isinstance(whole, list) and isinstance(part, list):
        return whole + part
    return whole + part if isinstance(whole, str) and isinstance(part, str) else part


def of_choices(events: Iterable[Any], part: str) -> dict[int, Any]:
    """Choices of chunks, or of a whole answer, by index."""
    found: dict[int, Any] = {}
    for event in events:
        for choice in event["choices"]:
            said = {key: one for key, one in (choice.get(part) or {}).items() if one is not None}
            calls = said.pop("tool_calls", [])
            one = {
                **said,
                **{key: one for key, one in choice.items() if key not in (part, "index")},
            }
            for index, call in enumerate(calls):
                function = call["function"]
                one |= {f"{key} {call.get('index', index)}": text for key, text in function.items()}
            one = {key: value for key, value in one.items() if value not in (None, "", [])}
            if isinstance(one.get("logprobs"), dict):
                one["logprobs"].pop("refusal", None)
            found[choice["index"]] = add(found.get(choice["index"], {}), one)
    return found


def of_blocks(events: Iterable[Any]) -> Any:
    """The message that events of /v1/messages make."""
    blocks: list[Any] = []
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                blocks.append({**event["content_block"], "input": ""})
            case "content_block_delta":
                delta = {key: one for key, one in event["delta"].items() if key != "type"}
                delta["input"] = delta.pop("partial_json", "")
                blocks[event["index"]] = add(blocks[event["index"]], delta)
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    for block in blocks:
        sent = block.pop("input")
        if block["type"] == "tool_use":  # A call may be cut.
            block["input"] = from_json(sent or "{}", allow_partial=True)
    return {**message, "content": blocks}


def plain(answer: Any) -> Any:
    """An answer without what is drawn or told by a clock."""
    if isinstance(answer, list):
        return [plain(one) for one in answer]
    if not isinstance(answer, dict):
        return answer
    drawn = ("id", "call_id", "created", "created_at", "completed_at", "item_id")
    return {key: plain(one) for key, one in answer.items() if key not in drawn}


def joined(path: str, events: list[Any]) -> Any:
    match path:
        case "/v1/responses":
            texts: dict[int, str] = {}
            for event in events:
                if event["type"].endswith(".delta"):
                    at = event["output_index"]
                    texts[at] = texts.get(at, "") + event["delta"]
            last = events[-1]["response"]
            for index, item in enumerate(last["output"]):
                said = item.get("arguments") or "".join(p["text"] for p in item.get("content", ()))
                assert texts.get(index, "") == said
            return last
        case "/v1/messages":
            return of_blocks(events)
        case _:
            part = "delta" if "chat" in path else "nothing"
            return of_choices(events, part), events[-1]["usage"]


def whole_of(path: str, answer: Any) -> Any:
    if "completions" not in path:
        return answer
    return of_choices([answer], "message" if "chat" in path else "nothing"), answer["usage"]


@pytest.mark.parametrize("path", FIELDS)
async def test_a_stream_says_what_the_whole_answer_says(tmp_path: Path, path: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(THINKING)
    needed, more = FIELDS[path]
    draws = random.Random(path)
    headers = {"content-type": "application/json"}
    async with (
        open_port(tmp_path, script_of([], [1]), max_context_tokens=2048) as port,
        aiohttp.ClientSession(f"http://{port.server.address}", headers=headers) as session,
    ):
        for _ in range(CASES):
            given = {
                key: draws.choice(values) for key, values in more.items() if draws.random() < 0.4
            }
            texts = ["".join(draws.choices(PIECES, k=draws.randint(0, 6))) for _ in range(3)]
            outputs = [[*port.ids(text), draws.randrange(400)] for text in texts]
            port.dispatcher.script = script_of(outputs, draws.choices([1, 2, AT_ONCE], k=4))
            asked = {"model": "tiny", **needed, **given}
            async with session.post(path, json=asked) as got:
                whole = await got.json()
                assert got.status == 200, (asked, whole)
            streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
            async with session.post(path, json=streamed) as got:
                lines = (await got.text()).split("\n")
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert plain(joined(path, events)) == plain(whole_of(path, whole)), (asked, texts)
