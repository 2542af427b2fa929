"""/v1/files and /v1/batches: tenants, bounds, errors, cancelling, and what outlives a process."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai_kit import Port, answers, open_port, says
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router import errors
from router.batching.journal import Journal
from router.batching.lines import BatchError, Line, answered
from router.batching.running import Answer, run
from router.doors.auth import TokenGate
from router.doors.batches.multipart import Upload
from router.doors.batches.pages import FilePages, _Content
from router.doors.batches.room import Room
from router.doors.batches.runner import MOST_RUNNING, _count_lines, _expire, _Results
from router.doors.batches.store import ENDED, FileStore
from router.doors.database import Bounds
from router.doors.http.connections import Connection
from router.errors import RouterError
from router.jobs import Job, JobEvent
from router.workers.load_estimate import Capacity
from telemetry.metrics.router import RouterLoad, RouterMetrics
from telemetry.names import Attr, Metric, Service
from telemetry.tracing import setup_tracing

BOUNDS = Bounds(1 << 20, 20, 30.0)
URL = "/v1/completions"
TENANTS = '"key-a" = "a"\n"key-b" = "b"\n[limits.a]\nrequests = 4\n'


@pytest.fixture
async def port(tmp_path: Path) -> AsyncIterator[Port]:
    """Tenants `a` and `b`; the client is `a`."""
    (tokens := tmp_path / "tokens.toml").write_text(TENANTS)
    files = FileStore(str(tmp_path / "kept"), BOUNDS)
    script, gate = says("The fox"), TokenGate(tokens)
    async with open_port(tmp_path, script, gate=gate, files=files, api_key="key-a") as port:
        yield port
    files.close()


def lines(*named: str, **more: Any) -> bytes:
    body = {"prompt": "fox", "max_tokens": 2}
    given = {"method": "POST", "url": URL, "body": body, **more}
    return b"".join(json.dumps({"custom_id": name, **given}).encode() + b"\n" for name in named)


async def upload(port: Port, content: bytes, name: str = "in.jsonl", **more: Any) -> Any:
    given = {"purpose": "batch", **more}
    return await port.client.files.create(file=(name, content), **given)


async def begin(port: Port, content: bytes, **more: Any) -> Any:
    file = await upload(port, content)
    given = {"endpoint": URL, "completion_window": "24h", **more}
    return await port.client.batches.create(input_file_id=file.id, **given)


async def ended(port: Port, batch: Any, wanted: Callable[[Any], bool] | None = None) -> Any:
    for _ in range(400):
        found = await port.client.batches.retrieve(batch.id)
        if wanted(found) if wanted else found.status in ENDED:
            return found
        await asyncio.sleep(0.05)
    raise AssertionError(found)


async def results(port: Port, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    content = await port.client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


def errors_of(batch: Any) -> list[str]:
    return [one.code for one in batch.errors.data]


async def test_a_batch_from_its_file_to_its_results(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that went well are in one file, others in another. The batch is its tenant's."""
    synced: list[threading.Thread] = []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append(threading.current_thread()))
    ends = "a\u2028\u2029\x85"
    content = lines(ends, "b") + lines("wrong", body={"prompt": 5}) + lines("other", url="/v1/chat")
    batch = await begin(port, content, metadata={"night": "one"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"night": "one"})
    done = await ended(port, batch)
    counts = done.request_counts
    assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 4, 2, 2)
    assert done.created_at <= done.in_progress_at <= done.completed_at < done.expires_at
    good = await results(port, done.output_file_id)
    assert sorted(one["custom_id"] for one in good) == [ends, "b"]
    assert {one["response"]["body"]["choices"][0]["text"] for one in good} == {"The fox"}
    bad = {one["custom_id"]: one for one in await results(port, done.error_file_id)}
    assert bad["wrong"]["response"]["body"]["error"]["param"] == "prompt"
    assert "url" in bad["other"]["error"]["message"]
    job = port.job
    assert (job.tenant, job.priority, job.quota.requests) == ("a", -100, 4)
    found = (await port.client.files.list(purpose="batch_output")).data
    assert {one.id for one in found} == {done.output_file_id, done.error_file_id}
    for _ in range(100):
        if len(synced) == 2:
            break
        await asyncio.sleep(0.05)
    assert len(synced) == 2
    assert threading.main_thread() not in synced, "the loop waits"


async def test_lines_that_are_not_done_in_time_say_so(tmp_path: Path) -> None:
    """Of a batch whose day ends in seconds, one line is done and the other waits."""

    async def second_waits(job: Job) -> AsyncGenerator[JobEvent]:
        if job.stopping.max_tokens > 2:
            await asyncio.sleep(60)
        async for event in says("The fox")(job):
            yield event

    clock = lambda: time.time() - 86400 + 4  # noqa: E731
    files = FileStore(str(tmp_path / "kept"), BOUNDS, clock)
    async with open_port(tmp_path, second_waits, files=files) as port:
        waits = lines("waits", body={"prompt": "fox", "max_tokens": 3})
        done = await ended(port, await begin(port, lines("done") + waits + b"no line\n"))
        counts = done.request_counts
        assert (done.status, counts.completed, counts.failed) == ("expired", 1, 2)
        assert [one["custom_id"] for one in await results(port, done.output_file_id)] == ["done"]
        bad = {one["custom_id"]: one["error"] for one in await results(port, done.error_file_id)}
        assert bad.pop("waits")["code"] == "batch_expired"
        assert [one["code"] for one in bad.values()] == ["invalid_line"]
    files.close()


async def test_what_says_that_it_is_final_is_not_sent_again(tmp_path: Path) -> None:
    """A request that kills workers is not given to the next ones."""
    raised = [
        errors.poison_request(2, 1, started=True),
        errors.worker_lost_mid_stream(1),
        errors.deadline_exceeded(1),
        errors.quota_exceeded("tokens", 0, 9, 4),
        errors.no_workers(retry_after_s=0.01),
    ]
    asked = Counter[int]()

    async def script(job: Job) -> AsyncGenerator[JobEvent]:
        asked[number := job.stopping.max_tokens - 1] += 1
        if asked[number] == 1:
            raise raised[number]
        async for event in says("The fox")(job):
            yield event

    files = FileStore(str(tmp_path / "kept"), BOUNDS)
    async with open_port(tmp_path, script, files=files) as port:
        each = [
            lines(str(number), body={"prompt": "fox", "max_tokens": number + 1})
            for number in range(len(raised))
        ]
        done = await ended(port, await begin(port, b"".join(each)))
        assert asked == Counter({0: 1, 1: 1, 2: 1, 3: 1, 4: 2})
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 4)
    files.close()


def test_lines_that_expire_are_not_held_together() -> None:
    kept: dict[str, str] = {}

    def asked() -> Iterator[Line]:
        for number in range(1, 4):
            assert len(kept) == number - 1, "the one before is written"
            yield Line(number, str(number))

    write = lambda result: kept.update({result["id"]: ""})  # noqa: E731
    _expire(asked(), SimpleNamespace(done=kept, write=write))  # type: ignore[arg-type]
    assert len(kept) == 3


def test_a_journal_stays_whole_and_writes_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = {"id": "1", "custom_id": "a"}
    with Journal(tmp_path / "out") as journal:
        assert journal.write(result) == journal.size
        write = os.write
        parts = iter([lambda file, data: write(file, data[:5]), lambda *_: os.write(-1, b"")])
        monkeypatch.setattr(os, "write", lambda file, data: (
            next(parts)(file, data) if file >= 0 else write(file, data)))  # fmt: skip
        with pytest.raises(OSError, match="Bad file"):
            journal.write(result)
        monkeypatch.undo()
        journal.write({"id": "2", "custom_id": "\ud800"})
    with (tmp_path / "other").open("wb") as other:  # Most likely by the journal's number.
        with pytest.raises(BatchError, match="closed"):
            journal.write(result)
        assert other.tell() == os.fstat(other.fileno()).st_size == 0
    with Journal(tmp_path / "out") as journal:
        assert journal.done == {"1": "a", "2": "\ud800"}


def test_a_batch_that_has_ended_keeps_nothing_more(tmp_path: Path) -> None:
    with Journal(tmp_path / "out") as output, Journal(tmp_path / "errors") as wrong:
        held = _Results(output, wrong)
        held.room = 1000
        held.write(answered(Line(1, "a"), 200, "", {}))
        held.write(answered(Line(1, "a"), 400, "", {}))
        held.write(answered(Line(2, "b"), 400, "", {}))
        assert held.end() == (1, 1)
        with pytest.raises(BatchError, match="ended"):
            held.write(answered(Line(3, "c"), 200, "", {}))
        assert (len(output._read()[0]), len(wrong._read()[0])) == (1, 1)


async def test_damaged_results_fail_their_batch(tmp_path: Path) -> None:
    files = FileStore(str(tmp_path / "kept"), BOUNDS)
    name, descriptor = files.begin()
    os.write(descriptor, lines("a"))
    os.close(descriptor)
    stated = {"endpoint": URL, "input_file_id": "file-1"}
    begun = await files.add_batch("", files.contents / name, stated, 86400.0)
    batch = await files.batch(begun["id"])
    assert batch is not None
    (files.contents / batch.output).write_text("{}\n")
    async with open_port(tmp_path, says("The fox"), files=files):
        for _ in range(100):
            if (batch := await files.batch(begun["id"])) and batch.status in ENDED:
                break
            await asyncio.sleep(0.05)
        assert batch is not None
        assert (batch.status, batch.object["errors"]["data"][0]["code"]) == ("failed", "stopped")
    files.close()


async def test_a_large_line_waits_for_workers(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which alone say how large a request may be."""
    asked = 0
    assert port.server._batches is not None
    inside = port.server._batches._inside
    known = inside.shape._models

    def later() -> Any:
        nonlocal asked
        asked += 1
        return known() if asked > 2 else ()

    monkeypatch.setattr(inside.shape, "_models", later)
    answer = await inside.send(URL, {"prompt": "fox " * 300_000, "max_tokens": 2})
    assert (answer.status, answer.is_final) == (503, False)


async def test_a_line_of_many_elements_is_not_parsed(port: Port) -> None:
    done = await ended(port, await begin(port, b"[" + b"[]," * 270_000 + b"[]]\n"))
    (wrong,) = await results(port, done.error_file_id)
    assert "objects and lists" in wrong["error"]["message"]


@pytest.mark.parametrize("limit", ["0", "10001", "000000001" + "0" * 3000, "1" + "0" * 3000, "x"])
async def test_a_limit_is_a_short_number(port: Port, limit: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await port.client.files.list(extra_query={"limit": limit})
    assert caught.value.param == "limit"


async def test_uploads_at_once_have_the_bound_of_one_each(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.doors.batches.pages.MOST_FILE_BYTES", 300_000)
    receive, beside = FilePages._receive, 400_000

    async def while_others(self: FilePages, *given: Any) -> Any:
        self._arriving["a"] = beside
        return await receive(self, *given)

    monkeypatch.setattr(FilePages, "_receive", while_others)
    assert (await upload(port, b"x" * 250_000)).bytes == 250_000
    beside = 1_000_000
    with pytest.raises(openai.RateLimitError):
        await upload(port, b"x" * 250_000)
    beside = 0
    with pytest.raises(openai.BadRequestError):
        await upload(port, b"x" * 350_000)


async def test_a_batch_that_finds_no_room_leaves_no_files(tmp_path: Path) -> None:
    files = FileStore(str(tmp_path), Bounds(1 << 20, 0, 30.0))
    with pytest.raises(RouterError):
        await files.add_batch("a", files.contents / "in", {"input_file_id": "file-1"}, 60.0)
    assert list(files.contents.iterdir()) == []
    files.close()


def test_empty_lines_do_not_count(tmp_path: Path) -> None:
    (path := tmp_path / "in").write_bytes(b"\n a\n \r\n" + b" " * (3 << 20) + b"b")
    assert _count_lines(path) == 2
    path.write_bytes(b"{}\n" + b"\n" * 50_001)
    assert _count_lines(path) == 50_001, "too many, of which the rest is not read"


async def test_reading_listing_and_deleting(port: Port) -> None:
    api = port.client.files
    kept = [await upload(port, lines("a"), f"{n}.jsonl") for n in range(3)]
    assert (kept[0].purpose, kept[0].bytes) == ("batch", len(lines("a")))
    assert await api.retrieve(kept[0].id) == kept[0]
    assert [one.id async for one in api.list(limit=2)] == [one.id for one in reversed(kept)]
    assert [one.id async for one in api.list(order="asc", after=kept[0].id)] == [
        one.id for one in kept[1:]
    ]
    assert (await api.delete(kept[1].id)).deleted
    for lost in (kept[1].id, "file-none", "..%2Ffiles.sqlite"):
        with pytest.raises(openai.NotFoundError):
            await api.retrieve(lost)
    batch = await begin(port, lines("a"))
    assert [one.id async for one in port.client.batches.list()] == [batch.id]
    await ended(port, batch)
    async for one in api.list(limit=2):
        await api.delete(one.id)
    assert (await api.list()).data == [], "also what stands behind a page that is gone"
    with pytest.raises(openai.BadRequestError) as caught:
        await api.list(after="file-none")
    assert caught.value.param == "after"


async def test_another_tenants_files_and_batches_are_not_there(port: Port) -> None:
    batch, other = await begin(port, lines("a")), port.client.with_options(api_key="key-b")
    done = await ended(port, batch)
    for file_id in (done.input_file_id, done.output_file_id):
        for asked in (other.files.retrieve, other.files.delete, other.files.content):
            with pytest.raises(openai.NotFoundError):
                await asked(file_id)
    for asked in (other.batches.retrieve, other.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await asked(batch.id)
    with pytest.raises(openai.NotFoundError):
        await other.batches.create(
            input_file_id=done.input_file_id, endpoint=URL, completion_window="24h"
        )
    assert (await other.files.list()).data == (await other.batches.list()).data == []
    with pytest.raises(openai.AuthenticationError):
        await port.client.with_options(api_key="none").files.list()


@pytest.mark.parametrize(
    ("content", "given", "named"),
    [
        (b"", {"purpose": "fine-tune"}, "purpose"),
        (b"", {"expires_after": {"anchor": "created_at", "seconds": 5}}, "expires_after.seconds"),
        (b"", {"name": "n" * 300}, "file"),
        (None, {"completion_window": "1h"}, "completion_window"),
        (None, {"endpoint": "/v1/moderations"}, "endpoint"),
        (None, {"metadata": {"a": "b" * 600}}, "metadata"),
        (None, {"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires"),
    ],
)
async def test_what_is_wrong_is_named(
    port: Port, content: bytes | None, given: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await (begin(port, lines("a"), **given) if content is None else upload(port, b"", **given))
    assert caught.value.param.startswith(named)


async def test_a_tenants_bounds_refuse_and_leave_nothing(
    port: Port, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 20
    for number in range(most):
        await upload(port, lines("a"), f"{number}.jsonl")
    with monkeypatch.context() as unread:
        unread.setattr(FilePages, "_receive", None)
        with pytest.raises(openai.RateLimitError) as caught:
            await upload(port, lines("a"))
    assert caught.value.code == "store_full"
    other = port.client.with_options(api_key="key-b")
    await other.files.create(file=("b.jsonl", b"x" * (1 << 19)), purpose="batch")
    for size in (1 << 20, 3 << 18):
        with pytest.raises(openai.RateLimitError):
            await other.files.create(file=("b.jsonl", b"x" * size), purpose="batch")
    contents = list((tmp_path / "kept/files").iterdir())
    assert len(contents) == most + 1
    assert {one.stat().st_mode & 0o777 for one in contents} == {0o600}
    assert (tmp_path / "kept/files").stat().st_mode & 0o777 == 0o700


async def test_results_that_find_no_room_end_the_batch(port: Port) -> None:
    await upload(port, b"x" * ((1 << 20) - 3000))
    done = await ended(port, await begin(port, lines(*map(str, range(12)))))
    assert (done.status, errors_of(done)) == ("failed", ["stopped"])
    assert 0 < len(await results(port, done.output_file_id)) < 12, "what was done is there"


async def test_batches_of_a_tenant_with_too_many_files_end(port: Port) -> None:
    """The results of the first are more files than a tenant may upload."""
    for number in range(20):
        file = await upload(port, lines("a"), f"{number}.jsonl")
    given = {"endpoint": URL, "completion_window": "24h", "input_file_id": file.id}
    begun = [await port.client.batches.create(**given) for _ in range(2)]
    assert {(await ended(port, batch)).status for batch in begun} == {"completed"}


async def test_files_end_with_their_days(tmp_path: Path) -> None:
    now = [1e9]
    store = FileStore(str(tmp_path / "kept"), BOUNDS, lambda: now[0])

    async def add(lives_s: float) -> Any:
        name, descriptor = store.begin()
        os.close(descriptor)
        os.utime(store.contents / name, (now[0], now[0]))
        return await store.add("a", name, 0, "a", "batch", lives_s)

    short, long = await add(3600.0), await add(float("inf"))
    now[0] += 2 * 86_400
    assert await store.file("a", short["id"]) is None
    assert await store.file("a", long["id"]) is not None
    await store.sweep()
    assert len(list(store.contents.iterdir())) == 1
    now[0] += 30 * 86_400
    await store.sweep()
    assert list(store.contents.iterdir()) == []
    store.close()


async def test_files_without_lines_fail(port: Port) -> None:
    done = await ended(port, await begin(port, b""))
    assert (done.status, errors_of(done)) == ("failed", ["wrong_number_of_lines"])
    assert done.output_file_id is None
    await port.client.files.delete(done.input_file_id)
    with pytest.raises(openai.NotFoundError):
        await port.client.files.retrieve(done.input_file_id)


class Gated:
    """Answers when it is let, and counts how often each prompt was asked."""

    def __init__(self) -> None:
        self.open = asyncio.Semaphore(0)
        self.under_way = 0
        self.most = 0

    async def __call__(self, job: Job) -> AsyncGenerator[JobEvent, None]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.open.acquire()
            async for event in answers(lambda _job, _choice: [5])(job):
                yield event
        finally:
            self.under_way -= 1


async def test_cancelling_ends_what_runs_and_keeps_what_is_done(tmp_path: Path) -> None:
    files, script = FileStore(str(tmp_path / "kept"), BOUNDS), Gated()
    (tokens := tmp_path / "tokens.toml").write_text(TENANTS)
    gate = TokenGate(tokens)
    async with open_port(tmp_path, script, gate=gate, files=files, api_key="key-a") as port:
        batch = await begin(port, lines(*map(str, range(9))))
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            await port.client.files.delete(batch.input_file_id)
        for _ in range(3):
            script.open.release()
        await ended(port, batch, lambda one: one.request_counts.completed == 3)
        assert (script.under_way, script.most) == (2, 2), "half of its tenant's four requests"
        now = await port.client.batches.cancel(batch.id)
        assert now.status in ("cancelling", "cancelled")
        done = await ended(port, batch)
        assert (done.status, script.under_way) == ("cancelled", 0)
        assert len(await results(port, done.output_file_id)) == 3
        with pytest.raises(openai.BadRequestError, match="has ended"):
            await port.client.batches.cancel(batch.id)
    files.close()


async def test_what_waits_is_ended_without_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a batch that runs on, one is cancelled, and another one's day ends."""
    files, script = FileStore(str(tmp_path / "kept"), BOUNDS), Gated()
    async with open_port(tmp_path, script, files=files) as port:
        runs, unwanted = [await begin(port, lines("a")) for _ in range(2)]
        monkeypatch.setattr("router.doors.batches.pages.WINDOW_S", 0.0)
        late = await begin(port, lines("a"))
        await port.client.batches.cancel(unwanted.id)
        assert (await ended(port, unwanted)).status == "cancelled"
        done = await ended(port, late)
        assert (done.status, done.request_counts.failed) == ("expired", 1)
        assert (await port.client.batches.retrieve(runs.id)).status == "in_progress"
    files.close()


async def test_who_stops_reading_a_file_loses_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.requests.bounds.BODY_GRACE_S", 0.05)
    monkeypatch.setattr("router.requests.bounds.BODY_BYTES_A_SECOND", 1 << 30)
    abort, aborted = Connection.abort, asyncio.Event()

    def watched(self: Connection) -> None:
        aborted.set()
        abort(self)

    monkeypatch.setattr(Connection, "abort", watched)
    files, size = FileStore(str(tmp_path / "kept"), Bounds(1 << 30, 20, 30.0)), 32 << 20
    name, descriptor = files.begin()
    os.ftruncate(descriptor, size)
    os.close(descriptor)
    file = await files.add("", name, size, "in.jsonl", "batch", 3600.0)
    async with open_port(tmp_path, says("The fox"), files=files) as port:
        _, writer = await asyncio.open_connection(*port.address)
        path = f"/v1/files/{file['id']}/content"
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        await asyncio.wait_for(aborted.wait(), 20)
        writer.close()
    files.close()


async def test_a_store_that_cannot_be_read_is_an_error_of_the_api(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    def locked(*_: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(FileStore, "page", locked)
    with pytest.raises(openai.InternalServerError) as caught:
        await port.client.files.list()
    assert caught.value.code == "internal"


def test_an_upload_that_has_ended_writes_no_other_file(tmp_path: Path) -> None:
    """A thread may be behind the end of its request."""
    files = FileStore(str(tmp_path / "kept"), BOUNDS)
    content = _Content(files)
    content.write(b"first")
    content.end()
    with (tmp_path / "other").open("wb") as other:  # Most likely by the content's number.
        content.write(b"late")
        assert os.fstat(other.fileno()).st_size == 0
    assert list(files.contents.iterdir()) == []
    files.close()


async def test_another_router_goes_on_where_one_stopped(tmp_path: Path) -> None:
    """They share the folder. While one holds a batch, the other leaves it alone."""
    stores, scripts = [FileStore(str(tmp_path), BOUNDS) for _ in range(2)], [Gated(), Gated()]
    metrics = RouterMetrics(RouterLoad)

    async def opened(number: int, held: AsyncExitStack) -> Port:
        (folder := tmp_path / str(number)).mkdir()
        given = {"files": stores[number], "events": metrics}
        return await held.enter_async_context(open_port(folder, scripts[number], **given))

    async with AsyncExitStack() as second:
        async with AsyncExitStack() as first:
            port = await opened(0, first)
            batch = await begin(port, lines(*map(str, range(40))))
            for _ in range(5):
                scripts[0].open.release()
            await ended(port, batch, lambda one: one.request_counts.completed == 5)
            other = await opened(1, second)
            await asyncio.sleep(1.2)
            assert (scripts[0].under_way, scripts[1].most) == (32, 0)
        for _ in range(35):
            scripts[1].open.release()
        done = await ended(other, batch)
        found = await results(other, done.output_file_id)
    assert done.status == "completed"
    assert Counter(one["custom_id"] for one in found) == Counter(map(str, range(40)))
    shown = metrics.registry.get_sample_value
    assert shown(f"{Metric.BATCH_LINES}_total", {"outcome": "ok"}) == 40
    assert shown(f"{Metric.REQUESTS_BY_METHOD}_total", {"method": f"BATCH {URL}"}) >= 40
    model = {"gen_ai_request_model": "tiny"}
    assert not shown(f"{Metric.TIME_TO_FIRST_TOKEN}_count", model), "nobody waits for them"
    for store in stores:
        store.close()


async def test_batches_that_others_run_keep_no_slot(tmp_path: Path) -> None:
    """As many as a router runs at once are locked. The next one's turn comes all the same."""
    names = [f"t{number}" for number in range(MOST_RUNNING + 1)]
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("".join(f'"key-{name}" = "{name}"\n' for name in names))
    files, gate = FileStore(str(tmp_path / "kept"), BOUNDS), TokenGate(tokens)
    held = AsyncExitStack()
    add = files.add_batch

    async def add_locked(tenant: str, *given: Any) -> Any:
        shown = await add(tenant, *given)
        if tenant != names[-1] and (batch := await files.batch(shown["id"])):
            held.enter_context(Journal(files.contents / batch.output))
        return shown

    files.add_batch = add_locked  # type: ignore[method-assign]
    given = {"gate": gate, "files": files, "api_key": "key-t0"}
    async with held, open_port(tmp_path, says("The fox"), **given) as port:
        for name in names:
            port.client.api_key = f"key-{name}"
            batch = await begin(port, lines("a"))
        assert (await ended(port, batch)).status == "completed"
    files.close()


@pytest.mark.parametrize(
    ("statuses", "stops"),
    [([200, 403, 403], False), ([403] * 7 + [200, 403], False), ([403] * 8, True), ([401], True)],
)
async def test_a_line_may_be_forbidden_alone(statuses: list[int], stops: bool) -> None:
    kept: list[int] = []
    write = lambda result: kept.append(result["response"]["status_code"])  # noqa: E731
    coming = iter(statuses)

    async def send(_url: str, _body: Any) -> Answer:
        return Answer(next(coming), "", {}, None)

    with pytest.raises(BatchError) if stops else nullcontext():
        numbers = range(1, len(statuses) + 1)
        await run(
            iter([Line(number, str(number), URL) for number in numbers]),
            SimpleNamespace(done={}, write=write),  # type: ignore[arg-type]
            send,
            at_once=1,
        )
    assert kept == (statuses[:-1] if stops else statuses)


async def test_a_line_is_a_trace_without_its_content(port: Port) -> None:
    exporter = InMemorySpanExporter()
    tracing = setup_tracing(Service.ROUTER, "r", exporter=exporter)
    assert tracing is not None
    done = await ended(port, await begin(port, lines("SECRET")))
    tracing.shutdown()
    found = {span.name: span for span in exporter.get_finished_spans()}
    line, inner = found[f"BATCH {URL}"], found["text_completion tiny"]
    assert line.attributes == {
        Attr.HTTP_ROUTE: URL,
        Attr.BATCH_ID: done.id,
        Attr.HTTP_RESPONSE_STATUS_CODE: 200,
    }
    assert inner.parent is not None
    assert inner.parent.span_id == line.context.span_id
    assert "SECRET" not in f"{[span.to_json() for span in found.values()]}"
    (result,) = await results(port, done.output_file_id)
    assert int(result["response"]["request_id"], 16) == line.context.trace_id


async def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    async with open_port(tmp_path, says("The fox")) as port:
        for asked in (upload(port, b""), port.client.batches.list(), begin(port, b"")):
            with pytest.raises(openai.NotFoundError, match="batches_folder"):
                await asked


async def test_a_page_of_another_origin_uploads_nothing(port: Port) -> None:
    with pytest.raises(openai.PermissionDeniedError):
        await upload(port, b"", extra_headers={"origin": "https://evil.example"})


def form(*parts: tuple[str, bytes]) -> bytes:
    return b"".join(b"--B\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (
        name.encode(), content) for name, content in parts) + b"--B--\r\n"  # fmt: skip


GOOD = form(('name="purpose"', b"batch"), ('name="file"; filename="a"', b"x\r\n--A\r\n-\r\n--"))


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(GOOD)])
def test_a_form_is_read_however_its_bytes_come(size: int) -> None:
    written = bytearray()
    upload = Upload("multipart/form-data; boundary=B", written.extend)
    for place in range(0, len(GOOD), size):
        upload.feed(GOOD[place : place + size])
    upload.close()
    assert (upload.fields, upload.filename) == ({"purpose": "batch"}, "a")
    assert written == b"x\r\n--A\r\n-\r\n--"


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("application/json", GOOD),
        ("multipart/form-data", GOOD),
        (f"multipart/form-data; boundary={'B' * 71}", GOOD),
        ("multipart/form-data; boundary=B", GOOD[:-4]),
        ("multipart/form-data; boundary=B", b"x" + GOOD),
        ("multipart/form-data; boundary=B", b"--B\r\n" + b"a: b\r\n" * 2000),
        ("multipart/form-data; boundary=B", form(("", b"x"))),
        ("multipart/form-data; boundary=B", form(('name="a"', b"x" * 2000))),
        ("multipart/form-data; boundary=B", form(*(('name="file"; filename="a"', b""),) * 2)),
        ("multipart/form-data; boundary=B", form(*((f'name="{n}"', b"") for n in range(20)))),
        ("multipart/form-data; boundary=B", form(("name=file; filename*=undefined''x", b""))),
        ("multipart/form-data; boundary=B", form((r"name=file; filename*=utf-7''+2AA-", b""))),
    ],
)
def test_what_is_no_form_is_refused(kind: str, content: bytes) -> None:
    def read() -> None:
        upload = Upload(kind, lambda _: None)
        upload.feed(content)
        upload.close()

    with pytest.raises(RouterError):
        read()


def test_headers_of_a_form_are_read_in_linear_time() -> None:
    """Python's own reader took 8 s for this one, on the event loop."""
    began_s = time.process_time()
    with pytest.raises(RouterError, match="too long"):
        Upload('multipart/form-data; boundary="' + ";" * 60_000, lambda _: None)
    upload = Upload('Multipart/form-data; x=";"; boundary="B"', lambda _: None)
    upload.feed(form((f'name="{";" * 4000}"', b"x"), (r'name="file"; filename="a\";b"', b"")))
    assert (upload.filename, upload.fields) == ('a";b', {";" * 4000: "x"})
    assert time.process_time() - began_s < 0.01


@pytest.mark.parametrize(
    ("queued", "workers", "enters"),
    [
        (0, [(True, True, 7, 0)], True),
        (0, [(True, True, 8, 0)], False),
        (0, [(True, True, 8, 0), (False, True, 3, 9999)], True),
        (1, [(True, True, 0, 0)], False),
        (0, [(True, False, 16, 20), (False, True, 0, 9999)], True),
        (0, [(True, False, 0, 21)], False),
        (0, [], True),
    ],
)
async def test_a_line_leaves_half_of_the_slots(
    queued: int, workers: list[tuple[bool, bool, int, int]], enters: bool
) -> None:
    """Workers: whether they prefill and decode; of 16 slots those that run; tokens that wait, of
    1,000 a second."""

    def worker(prefills: bool, decodes: bool, running: int, waiting: int) -> Any:
        capacity = Capacity(waiting, 0, 1000.0, 0.0, running, 16, 0, 0)
        return SimpleNamespace(prefills=prefills, decodes=decodes, capacity=lambda: capacity)

    room = Room(lambda: [worker(*one) for one in workers], lambda: queued)
    with nullcontext() if enters else pytest.raises(TimeoutError):
        await asyncio.wait_for(room.enter(), 0.2)
