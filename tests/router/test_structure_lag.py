"""What schemas cost the router's event loop, on which every stream waits."""

from __future__ import annotations

import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from standing_still import StandingStill

LATE_S = 0.01
REFUSED_S = 0.2
"""Most of it is the body's reading, 4 KiB in a turn of the loop. Where no context is as long as
here, a body of 3 MB is refused by its length, before it is read."""
ROUNDS = 4
STILL_S = LATE_S / 4
"""A machine that lets a process wait for longer at p99 is late by itself: another round."""
SERVER = """
import asyncio, sys
from pathlib import Path
import numpy as np
from openai_kit import open_port, says
from serving.garbage import set_apart

async def late(times):
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + 0.001
        await asyncio.sleep(0.001)
        times.append(loop.time() - due_s)

async def main():
    async with open_port(Path(sys.argv[1]), says("a"), max_context_tokens=131_072) as port:
        set_apart()  # As a router does.
        print(*port.address, flush=True)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            times = []
            watch = asyncio.create_task(late(times))
            await loop.run_in_executor(None, sys.stdin.readline)
            watch.cancel()
            print(float(np.percentile(times, 99)), max(times), flush=True)

asyncio.run(main())
"""
"""A router's HTTP port. A line begins to measure how late its loop is, another one ends that."""


def body(alternatives: int) -> bytes:
    """A request for one of so many objects, some 340 bytes each."""
    options = [
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "string", "maxLength": 20}},
            "required": [f"p{i}"],
            "additionalProperties": False,
            "description": "x" * 220,
        }
        for i in range(alternatives)
    ]
    schema = {"anyOf": options, "description": "NONCE"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    messages = [{"role": "user", "content": "Hi"}]
    return json.dumps({"model": "tiny", "messages": messages, "response_format": form}).encode()


class Server:
    """A process that serves, and its connection."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(folder)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        host, port = self.said()
        self.link = http.client.HTTPConnection(host, int(port), timeout=60)

    def said(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def send(self, content: bytes) -> tuple[str, float]:
        """What a request is told, and seconds until then."""
        began_s = time.perf_counter()
        headers = {"content-type": "application/json"}
        self.link.request("POST", "/v1/chat/completions", content, headers)
        answer = json.loads(self.link.getresponse().read())
        took_s = time.perf_counter() - began_s
        return answer["error"]["code"] if "error" in answer else "ok", took_s


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.process.kill()
    server.process.wait()


@pytest.mark.timeout(120)
def test_large_schemas_do_not_hold_up_the_event_loop(server: Server) -> None:
    """One near the bound is checked by a thread each time, since it is another one each time. One
    of 3 MB is refused by its size."""
    good, large = body(680), body(9_000)
    assert 240_000 < len(good) < 262_144 < 3_000_000 < len(large)
    assert server.send(good)[0] == "ok"
    was_still = False
    for round_ in range(ROUNDS):
        answers = []
        with StandingStill() as machine:
            server.tell()
            for number in range(6):
                nonce = f"{round_}.{number}".encode()
                answers.append(server.send(good.replace(b"NONCE", nonce)))
                answers.append(server.send(large))
            server.tell()
            p99_s, longest_s = map(float, server.said())
        assert {said for said, _ in answers[::2]} == {"ok"}
        assert {said for said, _ in answers[1::2]} == {"invalid_field"}
        checked_s, refused_s = (statistics.median(t for _, t in answers[i::2]) for i in (0, 1))
        print(
            f"loop {p99_s:.4f} {longest_s:.4f}; {refused_s=:.3f} {checked_s=:.3f} {machine.waits}"
        )
        if p99_s < LATE_S and refused_s < REFUSED_S:
            return
        was_still |= machine.waits.p99_s < STILL_S
    if not was_still:
        pytest.skip("others use this machine")
    raise AssertionError("late, on a machine that was not")
