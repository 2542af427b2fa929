"""The `baton` command."""

from __future__ import annotations

import errno
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Final

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from baton.addresses import CannotListenError, ask_loopback_directly
from baton.errors import (
    BatonError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
    UnreachableError,
)
from baton.version import __version__
from console import tls_hint
from console.adapters import command as adapters
from console.batching import command as batching
from console.commands import (
    ask,
    bench,
    certs,
    config,
    demo,
    doctor,
    health,
    model,
    serve,
    top,
    trace,
)
from console.fencing import command as fencing
from console.loadgen.errors import BenchError, WrongUseError
from console.long_help import LongHelp
from console.operator_calls import OperatorCallError
from console.planning import command as planning
from console.ports import PortTakenError
from console.roles import command as roles
from console.top.scrape import TopError
from console.tracing.traces import TraceError
from console.up import UpError, UpUseError
from engine.memory import NoRoomError
from local import vllm_flags
from router.batching.lines import BatchError
from serving.installing import install_line
from serving.models.demo_model import DemoModelError
from serving.models.hub import HubError
from serving.net.tls import TlsError
from serving.output import mend_streams, stderr, stdout
from serving.settings import WRONG_USE, SettingsError

FAILED: Final = 1
TRY_LATER: Final = 3
INTERRUPTED: Final = 130
_PYDANTICS: Final = "Value error, "
"""What pydantic, which reads typer's options, puts before a message."""
_LONG: Final = frozenset(("router", "worker", "prefill", "decode"))
"""Commands that take the settings of a process as options."""
_SHARED: Final = frozenset(
    ("baton", "console", "faults", "local", "prefixes", "serving", "telemetry")
)
_ENDS: Final = frozenset(("router", "worker", "worker_base", "engine", "kv_transfer"))
_SERVICES: Final = frozenset(("prefill_service", "decode_service", "fetch_service"))
ROOMS: Final = _SHARED | _ENDS | _SERVICES
"""Baton's own packages: a missing one is a bug. Any other package belongs to an extra."""


def explain(error: Exception) -> tuple[str, int] | None:
    """Returns a message for the user and the exit code; None if the error is a bug."""
    if (flag := getattr(error, "option_name", None)) and (hint := vllm_flags.answer(flag)):
        return hint, WRONG_USE
    match error:
        case UnreachableError():
            if hint := tls_hint.hint(error.message):
                return hint, WRONG_USE
            return (
                "no router answers there. Start one with `baton up`, or name it with --router "
                f"({error.message})",
                TRY_LATER,
            )
        case InvalidRequestError():
            wrong = [f"{v.field}: {v.description}" for v in error.violations]
            return "\n".join(wrong) or error.message, WRONG_USE
        case UnavailableError() | OverloadedError():
            again = f" (again in {error.retry_after_s:.1f} s)" if error.retry_after_s else ""
            return f"{error.reason}: {error.message}{again}", TRY_LATER
        case BatonError() if error.code.name == "UNIMPLEMENTED":
            return (
                "what answers there is no router's port for clients. `baton up` prints that as "
                "gRPC; --router names it",
                FAILED,
            )
        case BatonError():
            return f"{error.reason or error.code.name}: {error.message}", FAILED
        case SettingsError() | WrongUseError() | UpUseError():
            return str(error), WRONG_USE
        case (
            UpError()
            | PortTakenError()
            | DemoModelError()
            | HubError()
            | NoRoomError()
            | TraceError()
            | TopError()
            | OperatorCallError()
            | BenchError()
            | BatchError()
            | TlsError()
        ):
            return str(error), FAILED
        case CannotListenError():
            return str(error), FAILED
        case RuntimeError() if str(error).startswith("Failed to bind"):  # gRPC's words
            address = str(error).removeprefix("Failed to bind to address ").partition(";")[0]
            return f"cannot listen on {address}: is something else there?", FAILED
        case ModuleNotFoundError(name=str(name)) if name.partition(".")[0] not in ROOMS:
            return (
                f"{name.partition('.')[0]} is not installed. A router needs "
                f"`{install_line('router')}`, all else "
                f"`{install_line('worker', 'router', 'gguf')}`",
                FAILED,
            )
        case OSError(errno=errno.EADDRINUSE | errno.EADDRNOTAVAIL):
            return f"cannot listen: {error.strerror}", FAILED
        case OSError() if _is_of_output(error):
            return f"the output cannot be written: {error.strerror}", FAILED
        case OSError(filename=str(name), strerror=str(why)):
            return f"{name}: {why}", FAILED
        case UnicodeDecodeError():
            return "what came in is no text in UTF-8", WRONG_USE
        case _:
            return None


def _is_of_output(error: Exception) -> bool:
    full = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    return isinstance(error, OSError) and error.filename is None and error.errno in full


def _drop_output() -> None:
    """Drops buffered output. A second try at exit would end in a traceback."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _explained() -> Iterator[None]:
    """Turns errors that users can fix into one line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if (known := explain(error)) is None:
            if isinstance(message := getattr(error, "message", None), str):
                vars(error)["message"] = message.removeprefix(_PYDANTICS)
            raise
        message, code = known
        if _is_of_output(error):
            _drop_output()
        stderr.print(f"[bold red]error[/] {escape(message)}")
        raise typer.Exit(code) from None


class _Command(TyperCommand):
    """A command whose numbers are finite."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        context = super().make_context(*args, **kwargs)
        for name, value in context.params.items():
            if isinstance(value, float) and math.isinf(value):
                option = f"--{name.replace('_', '-')}"
                raise typer.BadParameter("must be finite", ctx=context, param_hint=option)
        return context


class _Commands(TyperGroup):
    """All commands. Errors are explained during `--version` and `--help`, too."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _explained():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _explained():
            return super().invoke(ctx)


app = typer.Typer(
    name="baton",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong use, 3 try again later, 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        stdout.print(__version__)
        raise typer.Exit


@app.callback()
def _baton(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Baton serves language models with prefill and decode on different workers.

    Try it: [cyan]baton demo[/]

    Serve here: [cyan]baton up --model FOLDER[/]

    Then ask: [cyan]baton generate "Hello!"[/]

    On several machines: [cyan]baton router[/] once, [cyan]baton prefill[/] or decode on each GPU
    """


def _add(panel: str, name: str, command: Callable[..., None]) -> None:
    """Registers a command. Its docstring is its help; paragraphs are wrapped to the terminal."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)
    kind = LongHelp if name in _LONG else _Command
    app.command(name, cls=kind, help=text, rich_help_panel=panel)(command)


_PANELS: Final[Mapping[str, Mapping[str, Callable[..., None]]]] = {
    "Start here": {"demo": demo.demo, "up": serve.up_command},
    "Serve": {
        "router": serve.router,
        "worker": serve.worker,
        "prefill": serve.prefill,
        "decode": serve.decode,
        "config": config.config,
        "model": model.model,
        "certs": certs.certs,
    },
    "Ask": {
        "generate": ask.generate,
        "models": ask.models,
        "batch": batching.batch,
        "trace": trace.trace,
        "health": health.health,
    },
    "Watch and measure": {
        "top": top.top,
        "bench": bench.bench,
        "doctor": doctor.doctor,
        "plan": planning.plan,
        "role": roles.role,
        "fence": fencing.fence,
        "adapters": adapters.adapters,
    },
}
for _panel, _commands in _PANELS.items():
    for _name, _command in _commands.items():
        _add(_panel, _name, _command)


def main() -> None:
    """Entry point of the installed command."""
    mend_streams()
    ask_loopback_directly(os.environ)
    app()


if __name__ == "__main__":
    main()
