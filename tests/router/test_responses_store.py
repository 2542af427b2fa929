"""Stored responses: chains, pages, tenants, bounds, and the file they lie in."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_kit import Port, open_port, prompt_of, says
from tool_templates import HERMES

from baton.worker.v1 import worker_pb2
from router.doors.auth import TokenGate
from router.doors.database import Bounds, StoreError
from router.doors.responses.store import FILE, Kept, ResponseStore, TooLongError

MODEL = "tiny"
BOUNDS = Bounds(1 << 20, 100, 30.0)
END = worker_pb2.END_REASON_END_OF_SEQUENCE


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    """Tenants `a` and `b`; the client is `a`."""
    (tmp_path / "chat_template.jinja").write_text(HERMES)
    (tokens := tmp_path / "tokens.toml").write_text('"key-a" = "a"\n"key-b" = "b"\n')
    store = ResponseStore(str(tmp_path / "kept"), BOUNDS)
    async with open_port(
        tmp_path,
        says("The fox", reason=END),
        gate=TokenGate(tokens),
        store=store,
        max_context_tokens=2048,
        api_key="key-a",
    ) as port:
        yield port
    store.close()


async def create(port: Port, text: str | list[Any], **fields: Any) -> Any:
    return await port.client.responses.create(model=MODEL, input=text, **fields)


async def test_a_chain_has_the_prompt_of_its_turns(port: Port) -> None:
    """Whether its items come from the store, by name or from the client. Instructions of earlier
    requests are not among them."""
    first = await create(port, "one", instructions="Be brief.")
    second = await create(port, "two", previous_response_id=first.id)
    await create(port, "three", previous_response_id=second.id, instructions="Be long.")
    chained = prompt_of(port.job)
    said = {"role": "assistant", "content": "The fox"}
    turns = [
        {"role": "system", "content": "Be long."},
        *({"role": "user", "content": "one"}, said, {"role": "user", "content": "two"}, said),
        {"role": "user", "content": "three"},
    ]
    await port.client.chat.completions.create(model=MODEL, messages=turns)
    assert prompt_of(port.job) == chained
    for kind in ({"type": "item_reference"}, {"type": None}, {}):
        ref = {**kind, "id": first.output[0].id}
        items = [turns[1], ref, turns[3], *second.model_dump()["output"], turns[5]]
        await create(port, items, instructions="Be long.", store=False)
        assert prompt_of(port.job) == chained


async def test_reading_listing_and_deleting(port: Port) -> None:
    api = port.client.responses
    kept, left = await create(port, "one"), await create(port, "two", store=False)
    assert (kept.store, left.store) == (True, False)
    assert await api.retrieve(kept.id) == kept
    (item,) = (await api.input_items.list(kept.id)).data
    assert (item.role, item.content[0].text) == ("user", "one")
    with pytest.raises(openai.BadRequestError):
        await api.cancel(kept.id)
    after = await create(port, "two", previous_response_id=kept.id)
    await api.delete(kept.id)
    with pytest.raises(openai.BadRequestError) as caught:
        await create(port, "three", previous_response_id=after.id)
    assert caught.value.code == "previous_response_not_found"
    for lost in (kept.id, left.id, "resp_none", "../responses.sqlite"):
        with pytest.raises(openai.NotFoundError):
            await api.retrieve(lost)


async def test_items_are_read_by_pages(port: Port) -> None:
    """Each once, though their sender gave all of them one id."""
    said = [{"id": "same", "role": "user", "content": str(number)} for number in range(5)]
    api, kept = port.client.responses.input_items, await create(port, said)
    for order, texts in (("asc", "01234"), ("desc", "43210")):
        read = [one async for one in api.list(kept.id, limit=2, order=order)]
        assert [one.content[0].text for one in read] == list(texts)
    wrong = {"limit": "000000001" + "9" * 5000, "order": "oldest", "after": "item_none"}
    for name, value in wrong.items():
        with pytest.raises(openai.BadRequestError) as caught:
            await api.list(kept.id, extra_query={name: value})
        assert caught.value.param == name


async def test_another_tenants_responses_are_not_there(port: Port) -> None:
    kept, other = await create(port, "one"), port.client.with_options(api_key="key-b")
    api = other.responses
    for asked in (api.retrieve, api.delete, api.cancel, api.input_items.list):
        with pytest.raises(openai.NotFoundError):
            await asked(kept.id)
    ref = [{"type": "item_reference", "id": kept.output[0].id}]
    jobs = len(port.dispatcher.jobs)
    for fields in ({"input": "two", "previous_response_id": kept.id}, {"input": ref}):
        with pytest.raises(openai.BadRequestError):
            await api.create(model=MODEL, **fields)
    assert len(port.dispatcher.jobs) == jobs
    assert await port.client.responses.retrieve(kept.id) == kept


async def test_a_full_disk_costs_no_answer(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    async def put(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(ResponseStore, "put", put)
    got = await create(port, "one")
    assert (got.output_text, got.store) == ("The fox", False)


def kept(name: str, previous: str | None = None, text: str = "") -> Kept:
    response = {"id": name, "output": [{"id": f"item-{name}", "text": text}]}
    return Kept(previous, [{"id": "in", "text": text}], response)


@pytest.mark.parametrize(
    ("bounds", "texts", "left"),
    [
        (Bounds(1 << 20, 2, 30.0), ["", "", ""], "23"),
        (Bounds(1000, 9, 30.0), ["a" * 300, "", "a" * 200], "23"),
        (Bounds(1 << 20, 9, 2.5), ["", "", "", ""], "234"),
    ],
)
async def test_bounds_hold_for_each_tenant(
    tmp_path: Path, bounds: Bounds, texts: list[str], left: str
) -> None:
    """A day passes with each response. Another tenant's, used last, stays."""
    days = [0.0]
    store = ResponseStore(str(tmp_path / "kept"), bounds, lambda: days[0] * 86_400)
    for number, text in enumerate(texts, 1):
        days[0] = number
        await store.put("a", kept(str(number), text=text))
        await store.put("b", kept(f"b{number}"))
    names = [str(number) for number in range(1, len(texts) + 1)]
    assert "".join([name for name in names if await store.get("a", name)]) == left
    assert await store.get("b", f"b{len(texts)}")
    store.close()


async def test_the_use_of_a_chain_keeps_all_of_it(tmp_path: Path) -> None:
    days = [0.0]
    store = ResponseStore(str(tmp_path / "kept"), BOUNDS, lambda: days[0] * 86_400)
    await store.put("a", kept("1"))
    await store.put("a", kept("2", "1"))
    days[0] = 20
    assert [one.response["id"] for one in await store.chain("a", "2", 1000) or ()] == ["1", "2"]
    with pytest.raises(TooLongError):
        await store.chain("a", "2", 99)
    days[0] = 40
    assert await store.chain("a", "2", 1000)
    assert await store.chain("b", "2", 1000) is None
    days[0] = 80
    assert await store.chain("a", "2", 1000) is None
    store.close()


def test_the_folder_is_this_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    ResponseStore(str(folder), BOUNDS).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def _open_to_all(folder: Path) -> None:
    folder.mkdir(mode=0o755)


def _linked(folder: Path) -> None:
    folder.with_name("real").mkdir(mode=0o700)
    folder.symlink_to(folder.with_name("real"))


def _linked_file(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / FILE).symlink_to(folder.with_name("elsewhere"))


def _no_database(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / FILE).write_text("no database" * 99)


def _file(folder: Path) -> None:
    folder.touch()


@pytest.mark.parametrize("made", [_open_to_all, _linked, _linked_file, _no_database, _file])
def test_a_folder_that_others_could_reach_is_refused(
    tmp_path: Path, made: Callable[[Path], None]
) -> None:
    made(tmp_path / "kept")
    with pytest.raises(StoreError) as caught:
        ResponseStore(str(tmp_path / "kept"), BOUNDS)
    assert "Errno" not in str(caught.value)
    assert not (tmp_path / "elsewhere").exists()


async def test_routers_share_a_folder(tmp_path: Path) -> None:
    """They open it at the same time, and write at the same time."""
    folder = str(tmp_path / "kept")
    stores = await asyncio.gather(
        *(asyncio.to_thread(ResponseStore, folder, BOUNDS) for _ in range(2))
    )
    names = [f"{store}-{number}" for store in range(2) for number in range(20)]
    await asyncio.gather(*(stores[int(name[0])].put("a", kept(name)) for name in names))
    for store in stores:
        assert all([await store.get("a", name) for name in names])
        store.close()
