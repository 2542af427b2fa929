"""`baton role`: lists the workers' roles, and changes one."""

from __future__ import annotations

import time
from typing import Annotated, Any, Final

import typer

from console.commands.tls_options import CaOption, CertOption, KeyOption, read_admin_over
from console.commands.trace import ROUTER_ADMIN_ADDRESS, AdminOption
from console.operator_calls import OperatorCallError, ask_router_json
from console.top.scrape import TIMEOUT_S
from serving.output import stderr, stdout

_LOOK_S: Final = 0.1
"""Time between two looks at a change, as between two load reports."""
_ROLES: Final = ("prefill", "decode", "both")


def role(
    worker: Annotated[str | None, typer.Argument(help="Its name. Default: list all.")] = None,
    to: Annotated[
        str | None, typer.Argument(metavar="[ROLE]", help="prefill, decode or both.")
    ] = None,
    admin: AdminOption = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the end of the change.")
    ] = 60.0,
    tls_ca: CaOption = "",
    tls_cert: CertOption = "",
    tls_key: KeyOption = "",
) -> None:
    """Show the workers' roles, or change one. The worker keeps weights and cached pages.

    The router and its workers keep running. Legs that the new role has none of may end first.
    BATON_OPERATOR_TOKEN must be the router's operator token, and the worker have --flexible.

    Example: [cyan]baton role prefill-1 decode[/]
    """
    address = (admin or ROUTER_ADMIN_ADDRESS).partition(",")[0]
    read_admin_over(tls_ca, tls_cert, tls_key, address)
    if worker is None or to is None:
        _show(_ask(address)["workers"], worker)
        return
    if to not in _ROLES:
        raise typer.BadParameter(f"a role is {', '.join(_ROLES[:2])} or {_ROLES[2]}, not {to!r}")
    began_s = time.monotonic()
    before = _ask(address, {"worker": worker, "role": to})
    while not _has(now := _find(_ask(address)["workers"], worker), to):
        if time.monotonic() - began_s > wait:
            raise OperatorCallError(
                f"{worker} is still {now['role']}: legs run that {to} has none of"
            )
        time.sleep(_LOOK_S)
    took_s = time.monotonic() - began_s
    stdout.print(f"{worker}: {before['role']} -> {to} in {took_s:.1f} s", highlight=False)


def _has(worker: dict[str, Any], role: str) -> bool:
    return worker["role"] == role and worker["next_role"] is None


def _find(workers: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found = next((one for one in workers if one["worker"] == name), None)
    if found is None:
        raise OperatorCallError(f"{name} is not attached")
    return found


def _show(workers: list[dict[str, Any]], name: str | None) -> None:
    shown = workers if name is None else [_find(workers, name)]
    if not shown:
        stderr.print("no worker is attached")
    for one in shown:
        to = f" -> {one['next_role']}" if one["next_role"] else ""
        fixed = "" if one["flexible"] else "  fixed"
        line = f"{one['worker']}  {one['model']}  {one['role']}{to}{fixed}"
        stdout.print(line, highlight=False, markup=False, soft_wrap=True)


def _ask(admin: str, change: dict[str, str] | None = None) -> Any:
    return ask_router_json(admin, "/roles", change, timeout_s=TIMEOUT_S)
