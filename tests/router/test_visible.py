"""Tenants that are bound to names: all others are as if they were not served, at every door."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import anthropic
import openai
import pytest
from frontdoor_kit import (
    ScriptedDispatcher,
    fails,
    ids_input,
    open_door,
    plays,
    refusal,
    served_model,
)
from grpc.aio import AioRpcError
from openai_kit import Port, open_port, says

from baton.inference.v1 import inference_pb2 as api
from router import errors
from router.call import Caller
from router.doors.auth import TokenGate, TokensFileError
from router.errors import RouterError
from router.requests.validation import Limits
from router.split_names import SplitNames
from router.visible import Visible
from telemetry.metrics.router import RouterLoad, RouterMetrics
from telemetry.names import Metric

FILE = """"sk-law" = "acme"
"sk-two" = "both"
"sk-all" = "house"
[models]
acme = ["law"]
both = ["tiny", "law", "later"]
"""


@pytest.fixture
def gate(tmp_path: Path) -> TokenGate:
    path = tmp_path / "tokens.toml"
    path.write_text(FILE)
    return TokenGate(path)


def input_for(name: str) -> api.GenerationInput:
    found = ids_input()
    found.model = name
    return found


def served(folder: Path | str) -> list:
    tiny = served_model(folder, max_context_tokens=256)
    return [tiny, *(replace(tiny, adapter=name, digest=b"1" * 32) for name in ("law", "poems"))]


@pytest.fixture
async def port(gate: TokenGate, tmp_path: Path) -> AsyncIterator[Port]:
    limits = Limits(split_names=SplitNames(["chat=law:1+poems:99", "verse=poems:1"]))
    async with open_port(tmp_path, says("The fox"), gate=gate, limits=limits) as port:
        port.dispatcher.served = served(tmp_path)
        yield port


@pytest.mark.parametrize(
    "table",
    ['nobody = ["law"]', "acme = []", 'acme = "law"', "acme = [3]", 'acme = [""]', "[models.acme]"],
)
def test_what_is_no_list_of_names_is_refused(tmp_path: Path, table: str) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(f'"sk-1" = "acme"\n[models]\n{table}\n')
    with pytest.raises(TokensFileError, match="models") as caught:
        TokenGate(path)
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    ("token", "names"),
    [("sk-law", ["law", "chat"]), ("sk-two", ["tiny", "law", "chat"]),
     ("sk-all", ["tiny", "law", "poems", "chat", "verse"])],
)  # fmt: skip
async def test_lists_have_what_the_caller_may_use(port: Port, token: str, names: list[str]) -> None:
    client = port.client.with_options(api_key=token)
    assert [one.id async for one in client.models.list()] == names
    for name in ("tiny", "law", "poems", "verse"):
        if name in names:
            assert (await client.models.retrieve(name)).id == name
        else:
            with pytest.raises(openai.NotFoundError) as caught:
                await client.models.retrieve(name)
            assert ("poems" in str(caught.value)) is (name == "poems")


Ask = Callable[[Port, openai.AsyncOpenAI, str], Awaitable[object]]


async def messages(port: Port, client: openai.AsyncOpenAI, name: str) -> object:
    url = f"http://{port.server.address}"
    async with anthropic.AsyncAnthropic(
        base_url=url, api_key=client.api_key, max_retries=0
    ) as other:
        turns = [{"role": "user", "content": "a"}]
        return await other.messages.create(model=name, messages=turns, max_tokens=4)


async def posted(client: openai.AsyncOpenAI, path: str, body: dict) -> object:
    return await client.post(path, body=body, cast_to=object)


ASKS: dict[str, Ask] = {
    "completions": lambda _, client, name: client.completions.create(model=name, prompt="a"),
    "echo": lambda _, client, name: client.completions.create(
        model=name, prompt="a", logprobs=1, echo=True
    ),
    "chat": lambda _, client, name: client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "a"}], logprobs=True
    ),
    "responses": lambda _, client, name: client.responses.create(model=name, input="a"),
    "messages": messages,
    "tokenize": lambda _, client, name: posted(client, "/tokenize", {"model": name, "prompt": "a"}),
    "detokenize": lambda _, client, name: posted(
        client, "/detokenize", {"model": name, "tokens": [70]}
    ),
    "embeddings": lambda _, client, name: client.embeddings.create(model=name, input="a"),
}


@pytest.mark.parametrize("ask", ASKS)
async def test_another_ones_adapter_is_no_model(port: Port, ask: str) -> None:
    """The error is the one for a name that nobody has, and names nothing else."""
    client = port.client.with_options(api_key="sk-law")
    said = []
    for name in ("poems", "verse", "other", "tiny"):
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)) as caught:
            await ASKS[ask](port, client, name)
        said.append(str(caught.value.body).replace(name, "NAME"))
    without_ids = {one.partition("trace")[0].partition("request_id")[0] for one in said}
    assert len(without_ids) == 1, without_ids
    assert not {"poems", "tiny"} & set(said[2].replace("'", " ").split())
    assert not port.dispatcher.jobs


async def test_a_split_name_leads_to_what_the_caller_may_use(port: Port) -> None:
    client = port.client.with_options(api_key="sk-law")
    for number in range(8):
        got = await client.completions.create(model="chat", prompt=f"text {number}")
        assert got.model == port.job.model.called == "law"
    await client.completions.create(model="", prompt="a")
    assert port.job.model.called == "law", "its only one"
    await port.client.with_options(api_key="sk-two").completions.create(model="", prompt="a")
    assert port.job.model.called == "tiny", "a model comes before an adapter"


async def test_requests_are_counted_by_adapter(gate: TokenGate, tmp_path: Path) -> None:
    counted = RouterMetrics(RouterLoad)
    async with open_port(tmp_path, plays([70, 71]), gate=gate, events=counted) as port:
        port.dispatcher.served = served(tmp_path)
        client = port.client.with_options(api_key="sk-all")
        for name in ("law", "law", "tiny"):
            await client.completions.create(model=name, prompt="a b")
        port.dispatcher.script = fails(errors.internal())
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="poems", prompt="a")
        prompt = port.dispatcher.jobs[0].prompt_tokens
    found = {
        tuple(sample.labels.values()): sample.value
        for family in counted.registry.collect()
        for sample in family.samples
        if sample.name in (f"{Metric.ADAPTER_REQUESTS}_total", f"{Metric.ADAPTER_TOKENS}_total")
    }
    assert found == {
        ("law", "ok"): 2,
        ("poems", "failed"): 1,
        ("law", "prompt"): 2 * prompt,
        ("law", "output"): 4,
    }


async def test_the_grpc_door_hides_it_too(gate: TokenGate, tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher(served(tmp_path), plays([70]))
    shown = (("authorization", "Bearer sk-law"),)
    async with open_door(dispatcher, gate=gate) as door:
        listed = await door.stub.ListModels(api.ListModelsRequest(), metadata=shown, timeout=20)
        found = [(one.name, one.parent, one.digest) for one in listed.models]
        assert found == [("law", "tiny", (b"1" * 32).hex())]
        await door.stub.Generate(
            api.GenerateRequest(input=input_for("law")), metadata=shown, timeout=20
        )
        asked = {
            "Generate": api.GenerateRequest(input=input_for("poems")),
            "Embed": api.EmbedRequest(model="poems", inputs=[{"text": "a"}]),
            "Score": api.ScoreRequest(model="poems", queries=["a"], documents=["b"]),
            "Tokenize": api.TokenizeRequest(model="poems", text="a"),
        }
        for method, request in asked.items():
            with pytest.raises(AioRpcError) as caught:
                await getattr(door.stub, method)(request, metadata=shown, timeout=20)
            assert refusal(caught.value).info.reason == "MODEL_NOT_FOUND", method
            assert dict(refusal(caught.value).info.metadata)["served"] == "law"
    assert [job.model.called for job in dispatcher.jobs] == ["law"]


def test_what_waits_is_said_of_own_names_alone(tmp_path: Path) -> None:
    dispatcher = ScriptedDispatcher(served(tmp_path), plays([70]))

    def reason(names: list[str], asked: str) -> str:
        with pytest.raises(RouterError) as caught:
            Visible(dispatcher, Caller("acme", models=frozenset(names))).model(asked)
        return caught.value.reason

    assert reason(["later", "x"], "") == reason(["law", "poems"], "") == "MODEL_NOT_FOUND"
    dispatcher.served = []
    assert reason(["law", "x"], "poems") == "MODEL_NOT_FOUND"
    assert reason(["law", "x"], "law") == reason(["law", "x"], "") == "NO_WORKERS"
    assert errors.no_workers("law").metadata["model"] == "law"
