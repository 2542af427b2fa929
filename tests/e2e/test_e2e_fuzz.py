"""Forms and chat turns that nobody would write: five minutes without a 500, a freeze or an end.

A router and a worker of their own bear it. Beside it a thread asks for `/health` all the time.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cluster import Cluster, running, spawn
from tiny_models import write_tiny_model
from tool_templates import HERMES

FUZZ_S = float(os.environ.get("BATON_FUZZ_S", "300"))
SEED = int(os.environ.get("BATON_FUZZ_SEED", "0")) or random.SystemRandom().getrandbits(32)
FROZEN_S = 120.0
"""An answer that takes longer is a freeze, also on a machine that others use."""
QUIET_S = 5.0
WAIT_S = 0.3
"""The p99 of `/health` may be so much longer than without nonsense, before it and behind it."""
WORDS = [
    "type", "properties", "items", "$ref", "$defs", "anyOf", "oneOf", "allOf", "not", "if",
    "then", "enum", "const", "pattern", "format", "minLength", "maxLength", "minimum",
    "maximum", "required", "additionalProperties", "prefixItems", "minItems", "maxItems",
    "uniqueItems", "contains", "propertyNames", "x-guidance", "description", "default"
]  # fmt: skip
VALUES: tuple[Any, ...] = (
    "object", "array", "string", "integer", None, True, False, 0, -1, 1e308, 2**70, "", "#", "#/",
    "#/$defs/a", "#/$defs/b", "(a+)+$", "[", "date-time", "\u0000", "é" * 40, [], {}, ["a", "b"],
)  # fmt: skip
PIECES = (
    "start: ", "root ::= ", "a", "b", "A", ": ", " ::= ", "\n", "|", "*", "+", "?", "{2,9999}",
    "{,}", "(", ")", '"x"', "/[a-z]+/", "/(a|b)*/", "&", "~", "%json {}", "%regex ", "%ignore /x/",
    "<[0]>", "<|x|>", "@", "[lazy]", "[capture]", "..", "\\", "'", "start", "root", "\u2028", " ",
)  # fmt: skip


class Nonsense:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def schema(self, depth: int = 0) -> Any:
        pick = self.random
        if depth > 6 or pick.random() < 0.2:
            return pick.choice(VALUES)
        if pick.random() < 0.1:
            return [self.schema(depth + 1) for _ in range(pick.randrange(4))]
        names = [pick.choice((*WORDS, "a", "b", "c" * 300)) for _ in range(pick.randrange(1, 7))]
        return {name: self.schema(depth + 1) for name in names}

    def grammar(self) -> str:
        pick = self.random
        count = pick.choice((3, 20, 200, 3000))
        text = "".join(pick.choice(PIECES) for _ in range(count))
        if pick.random() < 0.3:  # A chain, or a nest.
            one = pick.choice(PIECES)
            text = f"start: r0\n{text}" + one * pick.choice((10, 1000, 30_000))
        return text

    def form(self) -> dict[str, Any]:
        pick = self.random
        match pick.randrange(5):
            case 0:
                schema = {"name": "a", "schema": self.schema(), "strict": pick.random() < 0.5}
                return {"response_format": {"type": "json_schema", "json_schema": schema}}
            case 1:
                return {"guided_regex": self.grammar()}
            case 2:
                return {"guided_grammar": self.grammar()}
            case 3:
                return {"guided_choice": [pick.choice(PIECES) for _ in range(pick.randrange(9))]}
            case _:
                names = [pick.choice(("f", "g", "", "é")) for _ in range(pick.randrange(1, 4))]
                tools = [
                    {"type": "function", "function": {"name": one, "parameters": self.schema()}}
                    for one in names
                ]
                choice = pick.choice(("auto", "none", "required", {"type": "function"}, 3))
                return {"tools": tools, "tool_choice": choice}

    def turn(self) -> dict[str, Any]:
        pick = self.random
        turn: dict[str, Any] = {
            "role": pick.choice(("user", "assistant", "tool", "system", "developer", "x")),
            "content": pick.choice(
                ("Hi", "", None, [], [{"type": "text", "text": "a"}], {}, "\ud800", "x" * 5000)
            ),
        }
        if pick.random() < 0.4:
            arguments = pick.choice(("{}", "{", "[]", "", "[" * 500, json.dumps(self.schema())))
            call = {"name": pick.choice(("f", "")), "arguments": arguments}
            calls = [{"id": f"c{i}", "type": "function", "function": call} for i in range(3)]
            turn["tool_calls"] = calls * pick.choice((1, 1, 50))
        if pick.random() < 0.4:
            turn["tool_call_id"] = pick.choice(("c0", "c1", "", "none"))
        return turn

    def body(self) -> dict[str, Any]:
        turns = [self.turn() for _ in range(self.random.choice((1, 2, 5, 90)))]
        good = [{"role": "user", "content": "Hi"}]
        mixed = turns if self.random.random() < 0.5 else good
        return {"model": "tiny", "messages": mixed, "max_tokens": 2, **self.form()}


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S + 300)
def test_nonsense_is_refused_or_answered(tmp_path: Path) -> None:
    print(f"BATON_FUZZ_SEED={SEED}")
    (template := tmp_path / "tools.jinja").write_text(HERMES)
    with running(
        write_tiny_model(tmp_path / "tiny", max_positions=4096),
        tmp_path / "logs",
        prefill=0,
        decode=0,
        both=1,
        launch=spawn,
        own={"router": {"chat_template": template}},
    ) as cluster:
        quiet = [p99_of_health(cluster)]
        with watched(cluster) as waits_s:
            seen = asyncio.run(ask_nonsense(cluster))
        quiet.append(p99_of_health(cluster))
        figures = {"answers": seen, "p99_s": p99(waits_s), "quiet_p99_s": quiet}
        print(json.dumps({**figures, "longest_s": max(waits_s)}))
        assert all(process.poll() is None for process in cluster.processes.values())
        assert min(seen.get(200, 0), seen.get(400, 0)) > 0
        assert p99(waits_s) <= max(quiet) + WAIT_S, figures
        cluster.check_baseline()


async def ask_nonsense(cluster: Cluster) -> dict[int, int]:
    """Asks until the time is over, with an honest form between. How often each status came."""
    nonsense, seen = Nonsense(SEED), dict[int, int]()
    url, end_s = (
        f"http://{cluster.plan.http_address}/v1/chat/completions",
        time.monotonic() + FUZZ_S,
    )
    schema = {"name": "a", "schema": {"type": "integer"}}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    turns = [{"role": "user", "content": "Hi"}]
    honest = json.dumps({"model": "tiny", "messages": turns, "max_tokens": 2, **form})
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end_s:
            bodies = [json.dumps(nonsense.body()) for _ in range(4)]
            answers = await asyncio.gather(*(ask(session, url, body) for body in bodies))
            for body, (status, text) in zip(bodies, answers, strict=True):
                seen[status] = seen.get(status, 0) + 1
                assert status < 500, (SEED, text, body[:2000])
            assert (await ask(session, url, honest))[0] == 200
    return seen


async def ask(session: aiohttp.ClientSession, url: str, body: str) -> tuple[int, str]:
    headers = {"content-type": "application/json"}
    try:
        limit = aiohttp.ClientTimeout(total=FROZEN_S)
        content = body.encode()
        async with session.post(url, data=content, headers=headers, timeout=limit) as answer:
            return answer.status, await answer.text()
    except aiohttp.ClientOSError:  # A body may be too large to be read to its end.
        assert len(body) > 1 << 20
        return 400, ""


def p99_of_health(cluster: Cluster) -> float:
    """In a time in which nobody asks for anything else."""
    with watched(cluster) as waits_s:
        time.sleep(QUIET_S)
    return p99(waits_s)


def p99(waits_s: list[float]) -> float:
    return sorted(waits_s)[len(waits_s) * 99 // 100]


@contextmanager
def watched(cluster: Cluster) -> Iterator[list[float]]:
    """Asks for `/health` every 50 ms. Gives the waits, complete behind the block."""
    waits_s, over = list[float](), threading.Event()
    host, _, port = cluster.plan.http_address.rpartition(":")

    def watch() -> None:
        while not over.wait(0.05):
            connection = http.client.HTTPConnection(host, int(port), timeout=FROZEN_S)
            began_s = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            waits_s.append(time.monotonic() - began_s)
            connection.close()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield waits_s
    finally:
        over.set()
        thread.join()
    assert waits_s
