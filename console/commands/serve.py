"""Commands that start servers: `up`, `router`, `worker` and its short forms."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from baton.addresses import ROUTER_ADDRESS, check_free, host_of, local, port_of
from console import up
from console.commands.trace import ROUTER_ADMIN_ADDRESS
from console.ports import HOST
from console.room import check_room
from console.settings_options import takes_settings, warn_of_old_names, warn_of_unknown_variables
from console.supervisor import Supervisor, end_with_parent
from engine.hosts import early
from router.settings import RouterSettings
from serving.models import demo_model
from serving.output import merged_log, model_progress, silence, stderr, stdout
from serving.settings import Resolved, SettingsError, resolve
from worker.hosts.place import Place, placed
from worker.settings import Role, WorkerSettings, with_model_found


def _serve_worker(settings: WorkerSettings) -> None:
    end_with_parent()
    if not settings.routers:
        raise SettingsError("worker: `routers` must name a router: nobody finds this worker else")
    settings, place = placed(settings, os.environ)
    if place is not None:
        raise typer.Exit(_run_on_one_of(settings, place))
    if not settings.gpu_slots_dir:  # Else nobody knows yet which GPUs they may see.
        early.start(settings.ranks - 1)
    from worker.process import main

    check_free(listen=settings.listen, admin=settings.admin)
    raise typer.Exit(main(_with_model(settings)))


def _run_on_one_of(settings: WorkerSettings, place: Place) -> int:
    """On one of several hosts. What only keeps others' processes imports no PyTorch."""
    if place.node == 0:
        check_free(listen=settings.listen, admin=settings.admin, leader=place.listen)
    from worker.hosts import guard

    other = guard.guarded()
    if isinstance(other, guard.Child):
        return guard.main(other, settings)
    if place.node:
        from worker.hosts import agent

        agent.main(_with_model(settings), place, other)
    from worker.process import main

    return main(_with_model(settings), (place, other))


def _with_model(settings: WorkerSettings) -> WorkerSettings:
    with model_progress() as progress:
        return with_model_found(settings, progress)


@takes_settings(RouterSettings, "router")
def router(resolved: Resolved[RouterSettings]) -> None:
    """Run a router: clients send requests to it, and workers announce themselves to it.

    It needs no GPU and no PyTorch. Routers and workers may start in any order.
    """
    from router.server import main

    end_with_parent()
    settings = resolved.settings
    check_free(internal_listen=settings.internal_listen, admin=settings.admin)
    doors = {"listen": settings.listen, "http_listen": settings.http_listen}
    if settings.fast_listen:
        doors["fast_listen"] = settings.fast_listen
    check_free(reuse_port=settings.reuse_port, **doors)
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


HostOption = Annotated[
    str | None,
    typer.Option(
        help="Address at which clients are served; 0.0.0.0: all of this machine's. Others than "
        "loopback need a key. [default: that of BATON_LISTEN, else 127.0.0.1]",
        show_default=False,
    ),
]
DeviceOption = Annotated[
    up.Device, typer.Option(help="`auto`: one GPU a worker where there are any.")
]
ModelOption = Annotated[
    str,
    typer.Option(
        help="Folder, GGUF file or Hugging Face id (ORG/NAME) of the model; `demo` fetches a "
        "small one."
    ),
]
RanksOption = Annotated[
    int, typer.Option(min=1, help="Ranks of each worker: processes that divide the model.")
]
RoleRanksOption = Annotated[
    int | None, typer.Option(min=1, help="Ranks of each worker of this role, if they differ.")
]
StagesOption = Annotated[
    int, typer.Option(min=1, help="Stages of each worker, of `--tp` ranks each, for its layers.")
]
RoleStagesOption = Annotated[
    int | None, typer.Option(min=1, help="Stages of each worker of this role, if they differ.")
]
RoutersOption = Annotated[
    int, typer.Option(min=1, help="Routers, which share the addresses for clients.")
]
TemplateOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="Jinja file in place of the model's own.")
]
ShareOption = Annotated[
    bool,
    typer.Option(
        "--share-experts",
        help="The workers of a role hold a model's experts together (data-parallel attention).",
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        envvar="BATON_API_KEY",
        help="Key that clients must show. Others of this machine can read a command line: prefer "
        "the variable.",
    ),
]


TraceOption = Annotated[
    bool, typer.Option(help="Keep the latest traces in the first router: `baton trace` draws them.")
]
PoolOption = Annotated[
    float | None, typer.Option(min=0, help="Memory of each worker's KV pool, GiB.")
]
DrainOption = Annotated[
    float, typer.Option(min=0, help="Seconds that running requests get after Ctrl-C.")
]
CertsOption = Annotated[
    str,
    typer.Option(
        metavar="FOLDER",
        help="TLS between all processes and towards clients, with the certificates that "
        "[cyan]baton certs[/] made there.",
    ),
]


def up_command(
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    both: Annotated[int, typer.Option(min=0, help="Workers that do both by themselves.")] = 0,
    routers: RoutersOption = 1,
    model: ModelOption = demo_model.DEMO,
    tp: RanksOption = 1,
    prefill_tp: RoleRanksOption = None,
    decode_tp: RoleRanksOption = None,
    pp: StagesOption = 1,
    prefill_pp: RoleStagesOption = None,
    decode_pp: RoleStagesOption = None,
    share_experts: ShareOption = False,
    device: DeviceOption = "auto",
    trace: TraceOption = True,
    host: HostOption = None,
    api_key: KeyOption = None,
    chat_template: TemplateOption = None,
    port: Annotated[int | None, Port] = None,
    http_port: Annotated[int | None, Port] = None,
    admin_port: Annotated[int | None, Port] = None,
    kv_memory_gib: PoolOption = None,
    drain_s: DrainOption = 30.0,
    certs: CertsOption = "",
) -> None:
    """Run a router and its workers on this machine.

    Each is a process of its own; one log shows them all. One that dies is started again. Ctrl-C
    drains, a second Ctrl-C stops at once. Each process takes its other settings from BATON_* or
    baton.toml. So does this command for the addresses for clients (BATON_LISTEN,
    BATON_HTTP_LISTEN), the key, and the receiver of spans (BATON_OTLP_ENDPOINT), which then takes
    the place of `baton trace`.

    Example: [cyan]baton up --prefill 2 --decode 2 --model ./Llama-3.1-8B-Instruct[/]
    """
    warn_of_unknown_variables()
    routers_own = resolve(RouterSettings, "router", {"api_key": api_key})
    warn_of_old_names(routers_own)
    _check_certs(routers_own.settings, certs)
    listen, http_listen = (_set_address(routers_own, name) for name in ("listen", "http_listen"))
    options = up.UpOptions(
        model=model,
        prefill=prefill,
        decode=decode,
        both=both,
        routers=routers,
        tp=tp,
        tp_of={Role.PREFILL: prefill_tp, Role.DECODE: decode_tp},
        pp=pp,
        pp_of={Role.PREFILL: prefill_pp, Role.DECODE: decode_pp},
        share_experts=share_experts,
        device=device,
        trace=trace,
        host=host or host_of(listen),
        http_host=host or host_of(http_listen),
        api_key=routers_own.settings.api_key,
        chat_template=chat_template,
        otlp_endpoint=routers_own.settings.otlp_endpoint,
        has_tokens=bool(routers_own.settings.auth_tokens_file),
        grpc_port=port_of(listen) if port is None else port,
        http_port=port_of(http_listen) if http_port is None else http_port,
        admin_port=admin_port,
        kv_memory_gib=kv_memory_gib,
        drain_s=drain_s,
        certs=certs,
    )
    asyncio.run(_up(_planned(options), trace and not options.otlp_endpoint))


def _check_certs(routers_own: RouterSettings, certs: str) -> None:
    if any(routers_own.tls) and not certs:
        raise up.UpUseError("each process needs a certificate of its own: use --certs, not tls_dir")
    if certs and not (Path(certs) / "router").is_dir():
        raise up.UpUseError(f"{certs} has no folder `router`: `baton certs {certs}` makes it")


def _planned(options: up.UpOptions) -> up.UpPlan:
    """Finds the model, and plans processes that fit into memory together."""
    stages, ranks = (max(counts) for counts in zip(*map(options.grid_of, Role), strict=True))
    given = {
        "model": options.model,
        "kv_memory_gib": options.kv_memory_gib,
        "drain_s": options.drain_s,
        "pp": stages,
        "tp": ranks,
    }
    with model_progress() as progress:
        workers_own = resolve(WorkerSettings, "worker", given)
        warn_of_old_names(workers_own)
        if workers_own.settings.expert_group:
            raise up.UpUseError(
                "each worker needs a rank of its own: use --share-experts, not expert_group"
            )
        of_workers = with_model_found(workers_own.settings, progress)
    plan = up.plan(
        replace(
            options,
            model=of_workers.model,
            served_name=of_workers.served_name,
            gpu_memory_utilization=of_workers.gpu_memory_utilization,
        )
    )
    has_parts = max(map(options.ranks_of, Role)) > 1
    counts = not has_parts or "" in plan.workers_on  # Else each rank counts its part for itself.
    if counts and not options.share_experts:
        check_room(of_workers, plan.workers_on)
    return plan


def _set_address(routers_own: Resolved[RouterSettings], name: str) -> str:
    """An address for clients that the environment or a file sets; else the host alone."""
    is_set = routers_own.sources[name] != "default"
    return str(getattr(routers_own.settings, name)) if is_set else f"{HOST}:"


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
    """Lets the first signal drain and the second one kill. A closed terminal drains, too."""

    def stop() -> None:
        if supervisor.ended.is_set():
            supervisor.kill()
            return
        supervisor.ended.set()
        with suppress(OSError, SystemExit):  # Nobody may read it any more.
            stderr.print("\ndraining; once more stops at once")

    def closed() -> None:
        silence()
        supervisor.ended.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # Not under nohup.
        loop.add_signal_handler(signal.SIGHUP, closed)


def _say_how_to_talk(plan: up.UpPlan, took_s: float, traced: bool) -> None:
    ask = "baton generate"
    scheme, secure = ("grpcs://", "s") if plan.tls.ca else ("", "")
    if local(plan.router_address) != ROUTER_ADDRESS or scheme:
        ask += f" --router {scheme}{local(plan.router_address)}"
    if plan.tls.ca:
        ask += f" --tls-ca {plan.tls.ca}"
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
        f"  OpenAI   http{secure}://{plan.http_address}/v1",
        *(["  key      asked for: BATON_API_KEY"] if plan.asks_for_key else []),
        *(f"  metrics  http://{address}/metrics" for address in admins),
        f"  watch    [cyan]baton top{to_watch}[/]",
        *([f"  trace    [cyan]baton trace{to_trace}[/]"] if traced else []),
        "  stop     Ctrl-C",
    )
    stdout.print("\n" + "\n".join(lines) + "\n")
