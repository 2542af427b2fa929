"""Writes logs: one line a record, as JSON or as text, with trace id and process name.

A record consists of `message` and of the fields given as `extra`. Neither may hold a prompt, an
output, or the text of an exception, since such texts quote their arguments. A traceback is logged
as the class of each exception and the frames that it passed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any, Final, Literal, TextIO

from telemetry.names import Attr
from telemetry.tracing import trace_id_of

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

_OWN_FIELDS: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_TRACE_ID: Final = "trace_id"
_QUIET: Final = (
    "asyncio",
    "urllib3",
    "httpx",
    "filelock",
    "uvicorn.error",
    "transformers",
    "hpack",
)
"""Libraries whose informational lines only repeat Baton's own, or (hpack) have callers' tokens."""
_COLORS: Final = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.DEBUG: "\x1b[2m"}
_DIM: Final = "\x1b[2m"
_RESET: Final = "\x1b[0m"

logger = logging.getLogger(__name__)


def setup_logging(
    service_name: str,
    instance_id: str = "",
    level: Level = "info",
    log_format: Format = "text",
    stream: TextIO | None = None,
) -> None:
    """Sends all records of this process to one stream, in place of earlier handlers.

    Exceptions that end a thread are logged, too.

    Args:
        service_name: one of `names.Service`.
        instance_id: the process's own name, such as "prefill-0".
        level: lowest level that is logged.
        log_format: "json" or "text"; text is coloured on a terminal.
        stream: the stream; None: standard error.
    """
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(service_name, instance_id))
    else:
        handler.setFormatter(TextFormatter(colored=stream.isatty()))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    threading.excepthook = _log_thread_end


def log_loop_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Logs unawaited exceptions of this loop without their texts; asyncio would quote them."""
    loop.set_exception_handler(_log_loop_error)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, service_name: str, instance_id: str = "") -> None:
        super().__init__()
        self._process = {Attr.SERVICE_NAME: service_name, Attr.SERVICE_INSTANCE_ID: instance_id}

    def format(self, record: logging.LogRecord) -> str:
        """Writes a record as JSON. A value that JSON cannot express becomes its class's name."""
        found = {
            "time": _utc(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
            **_fields(record),
        }
        if record.exc_info and record.exc_info[1] is not None:
            found["exception"] = describe(record.exc_info[1])
        return _json(found)


class TextFormatter(logging.Formatter):
    """One line a record, with the frames of an exception below it."""

    def __init__(self, *, colored: bool) -> None:
        super().__init__()
        self._colored = colored

    def format(self, record: logging.LogRecord) -> str:
        """Writes time, level, message and fields."""
        fields = " ".join(f"{key}={_short(value)}" for key, value in _fields(record).items())
        at = f"{time.strftime('%H:%M:%S', time.localtime(record.created))}.{record.msecs:03.0f}"
        line = (
            f"{self._paint(_DIM, at)} "
            f"{self._paint(_COLORS.get(record.levelno, ''), f'{record.levelname.lower():<7}')} "
            f"{record.getMessage()}"
        )
        if fields:
            line += f"  {self._paint(_DIM, fields)}"
        if record.exc_info and record.exc_info[1] is not None:
            line += "".join(f"\n    {frame}" for frame in describe(record.exc_info[1]))
        return line

    def _paint(self, color: str, text: str) -> str:
        return f"{color}{text}{_RESET}" if self._colored and color else text


def describe(error: BaseException) -> list[str]:
    """Describes an exception and its causes without their texts.

    Each has a line with its class, then the frames that it passed, the innermost last.
    """
    seen: set[int] = set()
    lines: list[str] = []
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        lines.append(f"{'caused by ' if lines else ''}{_class(chain)}")
        lines += [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(chain.__traceback__)
        ]
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return lines


def _class(error: BaseException) -> str:
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{module}{kind.__qualname__}"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields given as `extra`, and the trace id, by default that of the current span."""
    fields = {key: value for key, value in vars(record).items() if key not in _OWN_FIELDS}
    if _TRACE_ID not in fields and (trace_id := _current_trace_id()):
        fields[_TRACE_ID] = trace_id
    return fields


def _current_trace_id() -> str:
    from opentelemetry import context

    return trace_id_of(context.get_current())


def _short(value: object) -> str:
    match value:
        case float():
            return f"{value:.4g}"
        case str() if not value or " " in value or not value.isprintable():
            return _json(value)
        case list() | tuple():
            return ",".join(map(str, value)) or "-"
        case _:
            return str(value)


def _json(value: object) -> str:
    """Writes JSON on one line. If a value has control characters, all non-ASCII is escaped.

    A caller may choose values, such as a tag. JSON allows some control characters that a terminal
    would act on.
    """
    text = json.dumps(value, default=_class_name, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value, default=_class_name)


def _class_name(value: object) -> str:
    return type(value).__name__


def _utc(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{record.msecs:03.0f}Z"


def _log_thread_end(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or isinstance(args.exc_value, SystemExit):
        return
    name = args.thread.name if args.thread is not None else ""
    logger.error(
        "an exception ended a thread", exc_info=args.exc_value, extra={"thread_name": name}
    )


def _log_loop_error(loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
    task = context.get("task") or context.get("future")
    name = task.get_name() if isinstance(task, asyncio.Task) else ""
    logger.error(
        "a task failed and nothing awaits it",
        exc_info=context.get("exception"),
        extra={"task": name},
    )
