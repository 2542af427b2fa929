"""Tokens at both front doors: who is let in, as which tenant, and what becomes of the others."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import grpc
import openai
import pytest
from frontdoor_kit import (
    ScriptedDispatcher,
    access_lines,
    ids_input,
    open_door,
    plays,
    refusal,
    served_model,
    write_tokenizer,
)
from openai_kit import open_port, says

from baton.client.clients import AsyncClient, Client
from baton.errors import DeniedError
from baton.inference.v1 import inference_pb2 as api
from router.doors.auth import OPEN, TokenGate, TokensFileError, gate_of
from router.errors import RouterError
from router.jobs import NO_QUOTA, Quota
from router.server import main
from router.settings import RouterSettings
from serving.settings import WRONG_USE
from telemetry.metrics.router import RouterLoad, RouterMetrics
from telemetry.names import Metric

GOOD, OTHER, BAD = "sk-good", "sk-other", "sk-bad"
SHOWN = (("authorization", f"Bearer {GOOD}"),)


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(f'"{GOOD}" = "acme"\n"{OTHER}" = "größe"\n')
    return path


@pytest.mark.parametrize(
    "shown",
    [None, "", "Bearer", f"Bearer {BAD}", "Bearer ", f"Digest {GOOD}", GOOD, f"Bearer{GOOD}"],
)
def test_nobody_else_is_let_in(tokens: Path, shown: str | None) -> None:
    with pytest.raises(RouterError) as caught:
        TokenGate(tokens).caller_of(shown)
    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("shown", [None, "", f"Bearer {BAD}", f"Bearer {GOOD} x", GOOD])
def test_one_key_lets_in_those_who_show_it(shown: str | None) -> None:
    gate = gate_of("", GOOD)
    assert gate.caller_of(f"bearer {GOOD}") == OPEN.caller_of(None), "it is no tenant's"
    with pytest.raises(RouterError) as caught:
        gate.caller_of(shown)
    assert caught.value.code is grpc.StatusCode.UNAUTHENTICATED
    assert "sk-" not in str(caught.value)


def test_a_key_and_a_file_are_not_both_taken(tokens: Path) -> None:
    with pytest.raises(ValueError, match="api_key or auth_tokens_file"):
        RouterSettings(api_key=GOOD, auth_tokens_file=str(tokens))


def test_a_token_names_its_tenant(tokens: Path) -> None:
    gate = gate_of(str(tokens))
    assert gate.caller_of(f"Bearer {GOOD}").tenant == "acme"
    assert gate.caller_of(f"bearer  {OTHER} ").tenant == "größe"
    assert gate_of("") is OPEN
    assert OPEN.caller_of(None).tenant == ""


def test_a_changed_file_counts_and_a_broken_one_does_not(
    tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    gate = TokenGate(tokens, lambda: now_s)
    tokens.write_text(f'"{BAD}" = "acme"\n')
    os.utime(tokens, ns=(1, 1))
    assert gate.caller_of(f"Bearer {GOOD}").tenant == "acme", "looked at once a second"
    now_s = 1.5
    assert gate.caller_of(f"Bearer {BAD}").tenant == "acme"
    with pytest.raises(RouterError):
        gate.caller_of(f"Bearer {GOOD}")
    for broken in (f'"{GOOD}" = 3', f"{GOOD} == [", '"" = "acme"', f'"{GOOD}" = ""'):
        now_s += 2
        tokens.write_text(broken)
        os.utime(tokens, ns=(int(now_s), int(now_s)))
        assert gate.caller_of(f"Bearer {BAD}").tenant == "acme"
    tokens.unlink()
    now_s += 2
    assert gate.caller_of(f"Bearer {BAD}").tenant == "acme"
    assert sum(record.levelno == logging.ERROR for record in caplog.records) == 5
    assert "sk-" not in caplog.text


def test_limits_of_a_tenant(tokens: Path) -> None:
    tokens.write_text(tokens.read_text() + "[limits.acme]\nrequests = 3\ntokens = 900\n")
    gate = TokenGate(tokens)
    assert gate.caller_of(f"Bearer {GOOD}").quota == Quota(requests=3, tokens=900)
    assert gate.caller_of(f"Bearer {OTHER}").quota == NO_QUOTA
    assert not gate.caller_of(f"Bearer {OTHER}").is_alone
    tokens.write_text(f'"{GOOD}" = "acme"\n"{OTHER}" = "acme"\n')
    assert TokenGate(tokens).caller_of(f"Bearer {OTHER}").is_alone


@pytest.mark.parametrize(
    "limits",
    ["[limits.nobody]\nrequests = 3", "[limits.acme]\nrequest = 3", "[limits.acme]\ntokens = 0",
     "[limits.acme]\ntokens = true", "[limits]\nacme = 3", "[limits.acme]\nsequences = 1.5"],
)  # fmt: skip
def test_limits_that_are_none(tokens: Path, limits: str) -> None:
    tokens.write_text(f"{tokens.read_text()}{limits}\n")
    with pytest.raises(TokensFileError, match="limits") as caught:
        TokenGate(tokens)
    assert "sk-" not in str(caught.value)


@pytest.fixture
def limited(tokens: Path) -> Path:
    tokens.write_text(tokens.read_text() + "[limits.acme]\nsequences = 3\n")
    return tokens


async def test_a_quota_reaches_the_job(limited: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    dispatcher = ScriptedDispatcher([served_model(tmp_path)], plays([70]))
    async with open_door(dispatcher, gate=TokenGate(limited)) as door:
        for token in (GOOD, OTHER):
            await door.stub.Generate(
                api.GenerateRequest(input=ids_input()),
                metadata=(("authorization", f"Bearer {token}"),),
                timeout=20,
            )
    assert [job.quota for job in dispatcher.jobs] == [Quota(sequences=3), NO_QUOTA]
    assert [job.holder for job in dispatcher.jobs] == ["acme", "größe"]


def test_a_file_that_was_read_half_written_is_read_again(tokens: Path) -> None:
    """The rest came within the same tick of the file system's clock."""
    now_s = 0.0
    whole = f'"{GOOD}" = "acme"\n"{OTHER}" = "beta"\n'
    tokens.write_text(whole.partition("\n")[0])
    os.utime(tokens, ns=(7, 7))
    gate = TokenGate(tokens, lambda: now_s)
    tokens.write_text(whole)
    os.utime(tokens, ns=(7, 7))
    now_s += 2
    assert gate.caller_of(f"Bearer {OTHER}").tenant == "beta"


def test_a_router_does_not_start_on_a_file_that_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.server.setup_logging", lambda *_: None)  # for all later tests, too
    missing = str(tmp_path / "none.toml")
    with pytest.raises(TokensFileError):
        gate_of(missing)
    assert main(RouterSettings(auth_tokens_file=missing)) == WRONG_USE
    assert "No such file" in caplog.text


async def test_every_grpc_method_asks_for_it(
    tokens: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_tokenizer(tmp_path)
    dispatcher = ScriptedDispatcher([served_model(tmp_path)], plays([70]))
    counted = RouterMetrics(RouterLoad)
    async with open_door(dispatcher, events=counted, gate=TokenGate(tokens)) as door:
        calls = {
            "Generate": (door.stub.Generate, api.GenerateRequest(input=ids_input())),
            "Tokenize": (door.stub.Tokenize, api.TokenizeRequest(text="a")),
            "ListModels": (door.stub.ListModels, api.ListModelsRequest()),
        }
        for method, request in calls.values():
            for metadata in ((), (("authorization", f"Bearer {BAD}"),)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await method(request, metadata=metadata, timeout=20)
                found = refusal(caught.value)
                assert (found.code.name, found.info.reason) == ("UNAUTHENTICATED",) * 2
            await method(request, metadata=SHOWN, timeout=20)
        stream = door.stub.StreamGenerate(api.StreamGenerateRequest(input=ids_input()))
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
    assert [(job.tenant, job.cache_salt) for job in dispatcher.jobs] == [("acme", b"acme")]
    rejected = {"reason": "UNAUTHENTICATED"}
    assert counted.registry.get_sample_value(Metric.REJECTIONS + "_total", rejected) == 7
    lines = access_lines(caplog)
    assert [line["tenant"] for line in lines] == ["", "", "acme"] * 3 + [""]
    assert "sk-" not in f"{lines}{caplog.text}"


async def test_the_python_clients_show_it(tokens: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    dispatcher = ScriptedDispatcher([served_model(tmp_path)], plays([70]))
    async with open_door(dispatcher, gate=TokenGate(tokens)) as door:
        async with AsyncClient(door.address, token=OTHER) as client:
            assert (await client.generate("a")).token_ids == (70,)
            assert [delta.token_ids async for delta in client.stream("a")]
            assert await client.models()
            assert await client.tokenize("a")
        async with AsyncClient(door.address, token=BAD) as client:
            with pytest.raises(DeniedError):
                await client.models()
        assert {job.tenant for job in dispatcher.jobs} == {"größe"}

        def blocking() -> int:
            with Client(door.address, token=GOOD) as client:
                return len(client.generate("a").token_ids) + len(client.models())

        assert await asyncio.to_thread(blocking) == 2


async def test_openais_client_shows_its_key(tokens: Path, tmp_path: Path) -> None:
    gate = TokenGate(tokens)
    async with open_port(tmp_path, says("a"), gate=gate, api_key=GOOD) as port:
        await port.client.completions.create(model="tiny", prompt="a")
        assert (port.job.tenant, port.job.cache_salt) == ("acme", b"acme")
        assert (await port.client.models.list()).data
        denied = port.client.with_options(api_key=BAD)
        for call in (
            denied.completions.create(model="tiny", prompt="a"),
            denied.chat.completions.create(model="tiny", messages=[]),
            denied.models.retrieve("tiny"),
        ):
            with pytest.raises(openai.AuthenticationError) as caught:
                await call
            assert caught.value.code == "unauthenticated"
        with pytest.raises(openai.AuthenticationError):
            await denied.models.list()
        assert len(port.dispatcher.jobs) == 1
        health = await port.client._client.get(f"http://{port.server.address}/health")
        assert health.status_code == 200
