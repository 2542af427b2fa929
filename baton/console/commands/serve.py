"""Commands that start servers: `up`, `router`, `worker` and its short forms."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Annotated

import typer
from rich.markup import escape

from baton import demo_model
from baton.addresses import check_free
from baton.console import up
from baton.console.commands.trace import ROUTER_ADMIN_ADDRESS
from baton.console.settings_options import takes_settings, warn_of_unknown_variables
from baton.console.supervisor import Supervisor, end_with_parent
from baton.output import merged_log, model_progress, stderr, stdout
from baton.process.settings import Resolved
from router.settings import RouterSettings
from worker.settings import Role, WorkerSettings


def resolve_model(model: str) -> str:
    """Returns the folder that `--model` names. Fetches the demo model if needed."""
    with model_progress() as progress:
        return demo_model.resolve(model, progress)


def _serve_worker(settings: WorkerSettings) -> None:
    from worker.process import main

    end_with_parent()
    check_free(listen=settings.listen, admin=settings.admin)
    folder = resolve_model(settings.model)
    raise typer.Exit(main(settings.model_copy(update={"model": folder})))


@takes_settings(RouterSettings, "router")
def router(resolved: Resolved[RouterSettings]) -> None:
    """Run a router: clients send requests to it, and workers announce themselves to it.

    It needs no GPU and no PyTorch. Routers and workers may start in any order.
    """
    from router.server import main

    end_with_parent()
    settings = resolved.settings
    check_free(internal_listen=settings.internal_listen, admin=settings.admin)
    check_free(
        reuse_port=settings.reuse_port, listen=settings.listen, http_listen=settings.http_listen
    )
    raise typer.Exit(main(settings))


@takes_settings(WorkerSettings, "worker")
def worker(resolved: Resolved[WorkerSettings]) -> None:
    """Run one worker: a model on one device, in one role.

    Example: [cyan]baton worker --role both --model ./Llama-3.1-8B-Instruct[/]
    """
    _serve_worker(resolved.settings)


@takes_settings(WorkerSettings, "worker", role=Role.PREFILL)
def prefill(resolved: Resolved[WorkerSettings]) -> None:
    """Run a prefill worker: short for [cyan]baton worker --role prefill[/]."""
    _serve_worker(resolved.settings)


@takes_settings(WorkerSettings, "worker", role=Role.DECODE)
def decode(resolved: Resolved[WorkerSettings]) -> None:
    """Run a decode worker: short for [cyan]baton worker --role decode[/]."""
    _serve_worker(resolved.settings)


Port = typer.Option(
    metavar="PORT",
    min=0,
    max=65535,
    help="Default: the usual port or the next free one. 0: any.",
)


def up_command(
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    both: Annotated[int, typer.Option(min=0, help="Workers that do both by themselves.")] = 0,
    routers: Annotated[
        int, typer.Option(min=1, help="Routers, which share the addresses for clients.")
    ] = 1,
    model: Annotated[
        str, typer.Option(help="Folder of the model; `demo` fetches a small one.")
    ] = demo_model.DEMO,
    device: Annotated[
        up.Device, typer.Option(help="`auto`: one GPU a worker where there are any.")
    ] = "auto",
    trace: Annotated[
        bool,
        typer.Option(help="Keep the latest traces in the first router: `baton trace` draws them."),
    ] = True,
    port: Annotated[int | None, Port] = None,
    http_port: Annotated[int | None, Port] = None,
    admin_port: Annotated[int | None, Port] = None,
    kv_memory_gib: Annotated[
        float | None, typer.Option(min=0, help="Memory of each worker's KV pool, GiB.")
    ] = None,
    drain_s: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get after Ctrl-C.")
    ] = 30.0,
) -> None:
    """Run a router and its workers on this machine.

    Each is a process of its own; one log shows them all. A worker that dies is started again, and
    so is a router if there are several. Ctrl-C drains, a second Ctrl-C stops at once. Each process
    takes its other settings from BATON_* or baton.toml.

    Example: [cyan]baton up --prefill 2 --decode 2 --model ./Llama-3.1-8B-Instruct[/]
    """
    warn_of_unknown_variables()
    options = up.UpOptions(
        model=resolve_model(model),
        prefill=prefill,
        decode=decode,
        both=both,
        routers=routers,
        device=device,
        trace=trace,
        grpc_port=port,
        http_port=http_port,
        admin_port=admin_port,
        kv_memory_gib=kv_memory_gib,
        drain_s=drain_s,
    )
    asyncio.run(_up(up.plan(options), trace))


async def _up(plan: up.UpPlan, traced: bool) -> None:
    write = merged_log([spec.name for spec in plan.specs])
    async with up.running(plan, write) as supervisor:
        _stop_on_signals(supervisor)
        started = time.monotonic()
        with stderr.status("starting") as status:
            await up.wait_until_ready(
                plan, supervisor, lambda names: status.update(f"waiting for {names}")
            )
        _say_how_to_talk(plan, time.monotonic() - started, traced)
        await supervisor.ended.wait()
    if supervisor.failed:
        raise up.UpError(supervisor.failed)
    stdout.print("everything has stopped")


def _stop_on_signals(supervisor: Supervisor) -> None:
    """Lets the first signal drain and the second one kill."""

    def stop() -> None:
        if supervisor.ended.is_set():
            supervisor.kill()
        else:
            stderr.print("\ndraining; once more stops at once")
            supervisor.ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def _say_how_to_talk(plan: up.UpPlan, took_s: float, traced: bool) -> None:
    ask = "baton generate"
    if not plan.router_address.endswith(f":{up.GRPC_PORT}"):
        ask += f" --router {plan.router_address}"
    admins = [address for _, address in plan.router_admin_addresses]
    to_watch = "" if admins == [ROUTER_ADMIN_ADDRESS] else f" --admin {','.join(admins)}"
    to_trace = (
        "" if plan.admin_address == ROUTER_ADMIN_ADDRESS else f" --admin {plan.admin_address}"
    )
    names = ", ".join(spec.name for spec in plan.specs)
    lines = (
        f"[bold green]Baton is ready[/] after {took_s:.1f} s: {escape(names)}",
        "",
        f'  ask      [cyan]{ask} "What is the capital of France?"[/]',
        f"  gRPC     {plan.router_address}",
        f"  OpenAI   http://{plan.http_address}/v1",
        *(f"  metrics  http://{address}/metrics" for address in admins),
        f"  watch    [cyan]baton top{to_watch}[/]",
        *([f"  trace    [cyan]baton trace{to_trace}[/]"] if traced else []),
        "  stop     Ctrl-C",
    )
    stdout.print("\n" + "\n".join(lines) + "\n")
