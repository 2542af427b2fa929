"""Lines of the log: what they say, and what they never say."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import hpack
import pytest

from telemetry.logs import Format, describe, log_loop_errors, setup_logging
from telemetry.names import Service

SECRET = "the prompt that must not leave"
logger = logging.getLogger("router.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = (root.handlers, root.level, threading.excepthook)
    yield io.StringIO()
    root.handlers, level, threading.excepthook = before
    root.setLevel(level)


def written(stream: io.StringIO) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stream.getvalue())
    return found


def fail(text: str) -> None:
    try:
        raise KeyError(text)
    except KeyError as error:
        raise ValueError(text) from error


def test_a_record_as_json(stream: io.StringIO) -> None:
    setup_logging(Service.DECODE, "decode-1", "info", "json", stream)
    logger.info("transfer done", extra={"trace_id": "ab" * 16, "pages": 17, "id": b"x"})
    logger.debug("not shown")
    found = written(stream)
    assert found.pop("time").endswith("Z")
    assert found == {
        "level": "info",
        "logger": "router.test",
        "message": "transfer done",
        "service.name": "baton-decode",
        "service.instance.id": "decode-1",
        "trace_id": "ab" * 16,
        "pages": 17,
        "id": "bytes",
    }


def test_a_record_as_text(stream: io.StringIO) -> None:
    setup_logging(Service.ROUTER, log_format="text", stream=stream)
    logger.warning(
        "worker lost", extra={"worker": "decode-0", "cause": "no answer", "after_s": 1.5}
    )
    line = stream.getvalue()
    assert line.endswith('warning worker lost  worker=decode-0 cause="no answer" after_s=1.5\n')
    assert "\x1b" not in line


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_what_a_caller_chose_cannot_begin_a_line_nor_steer_a_terminal(
    log_format: Format, stream: io.StringIO
) -> None:
    setup_logging(Service.ROUTER, log_format=log_format, stream=stream)
    logger.info("request", extra={"client_tag": "x\nforged\x1b[2J\x9b2J\u2028"})
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.rstrip("\n").isprintable()


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_exceptions_are_named_and_located_and_not_quoted(
    log_format: Format, stream: io.StringIO
) -> None:
    setup_logging(Service.ROUTER, log_format=log_format, stream=stream)
    try:
        fail(SECRET)
    except ValueError:
        logger.exception("a bug")
    line = stream.getvalue()
    assert SECRET not in line
    for word in ("ValueError", "caused by KeyError", "test_telemetry_logs.py", " fail"):
        assert word in line


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, two = ValueError(), KeyError()
    one.__cause__, two.__cause__ = two, one
    assert describe(one) == ["ValueError", "caused by KeyError"]


def test_a_thread_that_ends_by_an_exception_is_logged(stream: io.StringIO) -> None:
    setup_logging(Service.PREFILL, log_format="json", stream=stream)
    thread = threading.Thread(target=fail, args=(SECRET,), name="step-loop")
    thread.start()
    thread.join()
    assert written(stream)["thread_name"] == "step-loop"
    assert SECRET not in stream.getvalue()


async def test_an_exception_that_nobody_awaits_is_not_quoted(stream: io.StringIO) -> None:
    setup_logging(Service.ROUTER, log_format="json", stream=stream)
    loop = asyncio.get_running_loop()
    log_loop_errors(loop)

    async def forgotten() -> None:
        fail(SECRET)

    task = asyncio.create_task(forgotten(), name="pump")
    while not task.done():
        await asyncio.sleep(0)
    del task
    found = written(stream)
    assert found["task"] == "pump"
    assert found["exception"][0] == "ValueError"
    assert SECRET not in stream.getvalue()
    loop.set_exception_handler(None)


def test_headers_of_calls_are_not_logged(stream: io.StringIO) -> None:
    """Not even for those who look for defects: tokens of callers are among them."""
    setup_logging(Service.ROUTER, level="debug", stream=stream)
    logger.debug("shown")
    found = hpack.Decoder().decode(hpack.Encoder().encode([("authorization", SECRET)]))
    assert found == [("authorization", SECRET)]
    assert "shown" in stream.getvalue()
    assert "authorization" not in stream.getvalue()


def test_a_terminal_gets_colours(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    setup_logging(Service.ROUTER, stream=stream)
    logger.error("broken")
    assert "\x1b[31merror" in stream.getvalue()
    assert sys.stderr is not stream
