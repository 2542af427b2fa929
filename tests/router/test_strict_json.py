"""What every door sends is JSON, also for readers that take no Infinity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai_kit import open_port, says
from tool_templates import HERMES

from baton.worker.v1 import worker_pb2
from router.doors.responses.store import Bounds, ResponseStore

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": -1e400}}\n</tool_call>'
RESPONSE = """"input": "a", "tools": [{"type": "function", "name": "f", "parameters":
    {"type": "object", "properties": {"x": {"type": "number", "maximum": 1e400}}}}]"""
MESSAGE = """"messages": [{"role": "user", "content": "a"}], "max_tokens": 99,
    "tools": [{"name": "f"}]"""


def strict(text: str) -> Any:
    """What a strict reader makes of JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("/v1/responses", RESPONSE, ("tools", 0, "parameters", "properties", "x", "maximum")),
        ("/v1/messages", MESSAGE, ("content", 0, "input", "x")),
    ],
)
async def test_numbers_beyond_a_double_are_null(
    tmp_path: Path, path: str, fields: str, place: tuple[str | int, ...]
) -> None:
    (tmp_path / "chat_template.jinja").write_text(HERMES)
    store = ResponseStore(
        str(tmp_path / "kept"), Bounds(most_bytes=1 << 20, most_number=9, most_days=1)
    )
    script = says(CALL, reason=worker_pb2.END_REASON_END_OF_SEQUENCE)
    async with (
        open_port(tmp_path, script, max_context_tokens=2048, store=store) as port,
        aiohttp.ClientSession(f"http://{port.server.address}") as session,
    ):

        async def ask(more: str) -> str:
            headers = {"content-type": "application/json"}
            body = "{" + fields + more + "}"
            async with session.post(path, data=body, headers=headers) as got:
                assert got.status == 200
                return await got.text()

        found = whole = strict(await ask(""))
        for step in place:
            found = found[step]
        assert found is None
        events = await ask(', "stream": true')
        lines = [line for line in events.splitlines() if line.startswith("data: ")]
        assert all(strict(line.removeprefix("data: ")) for line in lines)
        if path == "/v1/responses":
            async with session.get(f"{path}/{whole['id']}") as got:
                assert strict(await got.text()) == whole
