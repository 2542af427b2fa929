"""`baton batch`: every line has one result, whatever happens to the process or the server."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificate_kit import of_router
from http_server import Asked, Reply, http_server
from tiny_models import write_tiny_model
from typer.testing import CliRunner, Result

from console.batching.server import Server
from console.cli import app
from router.batching.journal import Journal
from router.batching.lines import BatchError, Line, read_lines
from router.batching.running import MOST_BYTES, Answer, NobodyError, run

LINES = 120


class Echo:
    """Answers with the body, late, and some of the first tries with an error of the moment."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.busy = 0.0

    def __call__(self, asked: Asked) -> Reply:
        body = json.loads(asked.body)
        time.sleep(random.uniform(0.005, 0.03))
        self.seen[body["prompt"]] += 1
        is_busy = self.seen[body["prompt"]] == 1 and random.random() < self.busy
        is_busy |= body["prompt"] == "poison"
        if asked.path.startswith("/elsewhere"):  # A server of something else.
            return Reply(b"Not Found", 404)
        status = 400 if body["prompt"] == "bad" else 503 if is_busy else 200
        headers = {"retry-after": "0.01"}
        if body["prompt"] == "poison":
            headers["x-should-retry"] = "false"
        return Reply(json.dumps({"echo": body}).encode(), status, headers)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def url(echo: Echo) -> Iterator[str]:
    with http_server(echo) as address:
        yield f"http://{address}"


def line(name: str, **more: Any) -> dict[str, Any]:
    stated = {"custom_id": name, "method": "POST", "url": "/v1/completions"}
    return {**stated, "body": {"prompt": name}, **more}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(one)}\n" for one in lines))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def batch(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["batch", *map(str, arguments)])


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_process_that_is_killed_loses_and_doubles_nothing(
    tmp_path: Path, echo: Echo, url: str, kills: int
) -> None:
    source = write(tmp_path / "in.jsonl", *(line(f"r{number}") for number in range(LINES)))
    target = tmp_path / "out.jsonl"
    echo.busy = 0.2
    words = [sys.executable, "-m", "baton", "batch", source, target, "--url", url, "--at-once", "2"]
    done = [0]
    for _ in range(kills):
        process = subprocess.Popen(list(map(str, words)), stderr=subprocess.DEVNULL)
        more = done[-1] + random.randint(1, max(1, 2 * LINES // (3 * kills)))
        while process.poll() is None and len(lines_of(target)) < more:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "it was done before it was killed"
        done.append(len(lines_of(target)))
    assert done == sorted(set(done)), "each went on where the one before was killed"
    with target.open("ab") as file:
        file.write(b'{"id": "batch_req_1", "cust')  # A line that was written in part.
    assert subprocess.run(list(map(str, words)), check=False).returncode == 0
    found = Counter(one["custom_id"] for one in results(target))
    assert found == Counter(f"r{number}" for number in range(LINES))
    assert sum(echo.seen.values()) <= LINES * 2 + 2 * kills, "what was done is not sent again"


def test_a_server_of_pages_gets_no_line_a_result(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    with http_server(lambda _: Reply(b"<html>")) as address:
        told = batch(source, tmp_path / "out.jsonl", "--url", f"http://{address}")
    assert (told.exit_code, lines_of(tmp_path / "out.jsonl")) == (1, [])


def test_a_port_that_never_answers_such_a_url_ends_the_batch_at_once(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", line("a")), tmp_path / "out.jsonl"
    files = of_router(tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    grpc_server = grpc.server(ThreadPoolExecutor(1))
    grpc_port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    with (
        http_server(lambda _: Reply(b"{}")) as plain,
        socket.create_server(("127.0.0.1", 0)) as listening,
        context.wrap_socket(listening, server_side=True) as over_tls,
    ):
        threading.Thread(target=_accept, args=(over_tls,), daemon=True).start()
        for url, why in (
            (f"http://127.0.0.1:{grpc_port}", "does not speak HTTP/1 in clear"),
            (f"https://{plain}", "speaks no TLS: name it with http://"),
            (f"https://127.0.0.1:{over_tls.getsockname()[1]}", "is not trusted"),
        ):
            bench = CliRunner().invoke(app, ["bench", "--num", "1", "--url", f"{url}/v1"])
            for told in (batch(source, target, "--url", url), bench):
                assert told.exit_code == 1
                assert why in " ".join(told.output.split())
        told = CliRunner().invoke(app, ["fence", "--admin", f"127.0.0.1:{grpc_port}"])
        assert "does not answer: does the router run there?" in " ".join(told.output.split())
    grpc_server.stop(None)
    assert lines_of(target) == []


def _accept(server: ssl.SSLSocket) -> None:
    while server.fileno() >= 0:
        with suppress(OSError):  # The client leaves.
            server.accept()


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.is_file() else []


def test_a_server_of_something_else_gets_no_line_a_result(tmp_path: Path, url: str) -> None:
    source = write(tmp_path / "in.jsonl", line("a"))
    told = batch(source, tmp_path / "out.jsonl", "--url", f"{url}/elsewhere")
    assert told.exit_code == 1
    assert "answered 404: is this a router's HTTP port?" in " ".join(told.output.split())
    assert results(tmp_path / "out.jsonl") == []


def test_silence_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Server("http://127.0.0.1:1", 1) as server:
        for _ in range(2):
            with pytest.raises(NobodyError):
                asyncio.run(server.send("/v1/completions", {}))
    assert capsys.readouterr().err == "no answer from http://127.0.0.1:1, trying on\n"


def test_errors_are_results_of_their_lines(tmp_path: Path, echo: Echo, url: str) -> None:
    source = write(
        tmp_path / "in.jsonl",
        line("a"),
        line("a"),
        line("b", method="GET"),
        line("c", url="/v1/files"),
        line("d", body={"prompt": "d", "stream": True}),
        {"custom_id": 5},
        [],
        line("bad"),
        line("e", body={"prompt": "e", "priority": 3}),
        line("poison"),
    )
    with source.open("a") as file:
        file.write("{no json\n\n")
    told = batch(source, tmp_path / "out.jsonl", "--url", url)
    assert told.exit_code == 1, told.output
    assert "11 lines have a result\n9 of them failed" in told.output
    found = {
        int(one["id"].removeprefix("batch_req_")): one for one in results(tmp_path / "out.jsonl")
    }
    wrong = {number: one["error"]["message"] for number, one in found.items() if one["error"]}
    words = {
        2: "earlier",
        3: "POST",
        4: "url",
        5: "stream",
        6: "custom_id",
        7: "object",
        11: "JSON",
    }
    assert wrong.keys() == words.keys()
    assert all(words[number] in message for number, message in wrong.items())
    assert found[8]["response"]["status_code"] == 400
    sent = {number: found[number]["response"]["body"]["echo"] for number in (1, 9)}
    assert (sent[1]["priority"], sent[9]["priority"]) == (100, 3)
    before = results(tmp_path / "out.jsonl")
    again = batch(source, tmp_path / "out.jsonl", "--url", url)
    assert (again.exit_code, again.output) == (1, told.output), "they have failed still"
    assert results(tmp_path / "out.jsonl") == before
    assert echo.seen == Counter({"a": 1, "bad": 1, "e": 1, "poison": 1}), (
        "a router says what is final"
    )


def test_a_batch_that_cannot_go_on_stops_and_goes_on_later(tmp_path: Path, url: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, *(line(f"r{number}") for number in range(8)))

    def send(status: int) -> Any:
        async def answer(_url: str, body: Any) -> Answer:
            if body["prompt"] == "r4":
                if not status:
                    raise NobodyError
                return Answer(status, "", {}, 0.01)
            return Answer(200, "", body, None)

        return answer

    for status, words in ((0, "nobody"), (503, "503"), (401, "401")):
        with Journal(target) as journal:
            work = run(read_lines(source), journal, send(status), at_once=1, patience_s=0.05)
            with pytest.raises(BatchError, match=words):
                asyncio.run(work)
        assert [one["custom_id"] for one in results(target)] == ["r0", "r1", "r2", "r3"]
    assert batch(source, target, "--url", url).exit_code == 0
    assert sorted(one["custom_id"] for one in results(target)) == [f"r{n}" for n in range(8)]
    with Journal(target):
        told = batch(source, target, "--url", url)
        assert told.exit_code == 1
        assert "another process" in told.output
    write(source, *(line(f"s{number}") for number in range(8)))
    assert "of another file" in batch(source, target, "--url", url).output.replace("\n", " ")
    assert "is no file of results" in batch(target, source, "--url", url).output.replace("\n", " ")


@pytest.mark.parametrize(
    ("held", "is_torn"),
    [
        (b'{"model": "precious", "lines": 1}', False),
        (b"\0\0{}", False),
        (b"[" * 100_000 + b"\n", False),
        (b'{"id": "batch_r', True),
        (b'{"id":"batch_req_1","custom_id":"r\0\0', True),
        (b"\0\0", True),
    ],
)
def test_what_is_no_file_of_results_stays_as_it_is(
    tmp_path: Path, held: bytes, is_torn: bool
) -> None:
    """Also a file of one line without an end, which was taken for a result written in part."""
    (target := tmp_path / "out").write_bytes(held)
    wrong = pytest.raises(BatchError, match="is no file of results")
    with nullcontext() if is_torn else wrong, Journal(target) as journal:
        assert (journal.done, journal.size) == ({}, 0)
    assert target.read_bytes() == (b"" if is_torn else held)


@pytest.mark.parametrize(("size", "most"), [(1000, 8), (MOST_BYTES // 2, 2), (2 * MOST_BYTES, 1)])
def test_large_lines_are_not_many_at_once(tmp_path: Path, size: int, most: int) -> None:
    under_way, seen, taken = 0, [], 0

    def lines() -> Iterator[Line]:
        nonlocal taken
        for number in range(1, 21):
            taken += 1
            yield Line(number, str(number), "/", {}, size=size)

    async def send(_url: str, body: Any) -> Answer:
        nonlocal under_way
        under_way += 1
        seen.append((under_way, taken))
        await asyncio.sleep(0.01)
        under_way -= 1
        return Answer(200, "", body, None)

    with Journal(tmp_path / "out") as journal:
        asyncio.run(run(lines(), journal, send, at_once=8))
    assert len(results(tmp_path / "out")) == 20
    assert max(at_once for at_once, _ in seen) == most
    assert most == 8 or all(read <= place + 2 * most for place, (_, read) in enumerate(seen))


def test_a_model_in_this_process_runs_chats_completions_and_embeddings(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    chat = {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 4}
    source = write(
        tmp_path / "in.jsonl",
        line("completion", body={"prompt": "fox", "max_tokens": 4}),
        line("chat", url="/v1/chat/completions", body=chat),
        line("embedding", url="/v1/embeddings", body={"input": ["fox", "dog"]}),
        line("wrong", body={"prompt": "fox", "temperature": -1}),
    )
    told = batch(source, tmp_path / "out.jsonl", "--model", model)
    assert told.exit_code == 1, told.output
    found = {one["custom_id"]: one["response"] for one in results(tmp_path / "out.jsonl")}
    assert [found[name]["status_code"] for name in ("completion", "chat", "embedding")] == [200] * 3
    assert found["completion"]["body"]["choices"][0]["text"]
    assert found["chat"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(found["embedding"]["body"]["data"]) == 2
    assert found["wrong"]["status_code"] == 400
    assert all(one["request_id"] for one in found.values())
