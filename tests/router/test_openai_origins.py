"""The HTTP door answers web pages only where the operator says so; and what tells its state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2 as httpx  # what the OpenAI client brings
import pytest
from frontdoor_kit import ScriptedDispatcher, served_model, write_tokenizer
from openai_kit import open_port, says

from baton.version import __version__
from router import errors
from router.doors.openai.server import OpenAiServer
from router.jobs import ServedModel
from router.requests.tokenization import Tokenizers
from router.requests.validation import Limits

PAGE = "https://chat.example"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type,authorization",
}
COMPLETIONS = "/v1/completions"


class Loads(ScriptedDispatcher):
    """Has workers that load."""

    def model(self, name: str) -> ServedModel:
        raise errors.model_loading("tiny")


@asynccontextmanager
async def served(
    folder: Path,
    listen: str = "127.0.0.1:0",
    *,
    allowed_origins: Sequence[str] = (),
    dispatcher: ScriptedDispatcher | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A door with these options and a client on it."""
    write_tokenizer(folder)
    dispatcher = dispatcher or ScriptedDispatcher([served_model(folder)], says("a"))
    tokenizers = Tokenizers()
    server = OpenAiServer(listen, dispatcher, tokenizers, Limits(), allowed_origins=allowed_origins)
    await server.start()
    port = server.address.rpartition(":")[2]
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            yield client
    finally:
        await server.stop()
        tokenizers.close()


@pytest.mark.parametrize("name", ["evil.example", "evil.example:8000", "10.0.0.7", "[::2]:8000"])
async def test_a_local_door_answers_to_names_of_this_machine_alone(
    tmp_path: Path, name: str
) -> None:
    async with (
        open_port(tmp_path, says("a")) as port,
        httpx.AsyncClient(base_url=f"http://{port.server.address}") as client,
    ):
        answer = await client.get("/v1/models", headers={"host": name})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_host")
        for own in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"):
            assert (await client.get("/v1/models", headers={"host": own})).status_code == 200


async def test_a_door_for_all_answers_to_every_name(tmp_path: Path) -> None:
    async with served(tmp_path, "0.0.0.0:0") as client:
        assert (await client.get("/health", headers={"host": "baton.example"})).status_code == 200


@pytest.mark.parametrize("told", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_a_body_that_is_not_called_json_is_refused(tmp_path: Path, told: str) -> None:
    """A page can send those without asking first."""
    async with open_port(tmp_path, says("a")) as port:
        url = f"http://{port.server.address}{COMPLETIONS}"
        async with httpx.AsyncClient() as client:
            body = b'{"prompt": "a"}'
            refused = await client.post(url, content=body, headers={"content-type": told})
            charset = {"content-type": "Application/JSON; charset=utf-8"}
            taken = await client.post(url, content=body, headers=charset)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "malformed_request")
    assert "application/json" in refused.json()["error"]["message"]
    assert taken.status_code == 200
    assert len(port.dispatcher.jobs) == 1


@pytest.mark.parametrize(
    ("allowed", "is_allowed"),
    [((), False), (("https://other.example",), False), ((PAGE,), True), (("*",), True)],
)
async def test_pages_may_call_where_their_origin_is_allowed(
    tmp_path: Path, allowed: tuple[str, ...], is_allowed: bool
) -> None:
    async with served(tmp_path, allowed_origins=allowed) as client:
        asked = await client.options(COMPLETIONS, headers=PREFLIGHT)
        assert asked.is_success == is_allowed
        assert ("access-control-allow-origin" in asked.headers) == is_allowed
        body = {"prompt": "a"}
        answer = await client.post(COMPLETIONS, json=body, headers={"origin": PAGE})
        assert ("access-control-allow-origin" in answer.headers) == is_allowed


async def test_the_release_is_told(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        assert (await client.get("/version")).json() == {"version": __version__}


async def test_the_list_of_models_says_that_one_loads(tmp_path: Path) -> None:
    """Not an empty list: a client that takes its first model would fail at a riddle."""
    async with served(tmp_path, dispatcher=Loads([], says("a"))) as client:
        answer = await client.get("/v1/models")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "model_loading"
    assert "tiny" in answer.json()["error"]["message"]
    assert float(answer.headers["retry-after"]) > 0
