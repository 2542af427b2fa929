"""`baton fence`: lists lost workers whose end nobody has seen, and says of one that it is gone."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Final

import typer

from console.commands.tls_options import CaOption, CertOption, KeyOption, read_admin_over
from console.commands.trace import ROUTER_ADMIN_ADDRESS, AdminOption
from console.operator_calls import OperatorCallError, ask_router_json
from console.top.scrape import TIMEOUT_S
from serving.output import stderr, stdout

_PAGE: Final = "/fence"
_EPOCH: Final = re.compile("[0-9a-f]{16}")


def fence(
    worker: Annotated[str | None, typer.Argument(help="Its name. Default: list all.")] = None,
    epoch: Annotated[
        str, typer.Option(metavar="HEX", help="Which start of it: 16 digits, as the list has them.")
    ] = "",
    admin: AdminOption = None,
    tls_ca: CaOption = "",
    tls_cert: CertOption = "",
    tls_key: KeyOption = "",
) -> None:
    """Show lost workers whose end nobody has seen, or say of one that it is gone for good.

    Pages that a lost worker may still write are kept from others until all of its processes are
    known to have ended. A host without power cannot say so, and an operator who has cut it off can.
    If it still runs, it may write into pages of other requests, whose answers are then wrong.
    Fence at every router: each has a list of its own. A name or epoch that is not in it is refused.
    BATON_OPERATOR_TOKEN must be the routers' operator token.

    Example: [cyan]baton fence prefill-1 --epoch 4be1c0d5a9f20317 --admin A:9090,B:9090[/]
    """
    if worker is None and epoch:
        raise typer.BadParameter("say whose start that is: WORKER", param_hint="worker")
    if worker is not None and not _EPOCH.fullmatch(epoch):
        wrong = "say which start is gone, by its 16 hexadecimal digits: --epoch"
        raise typer.BadParameter(wrong, param_hint="--epoch")
    addresses = (admin or ROUTER_ADMIN_ADDRESS).split(",")
    refused = []
    for address in addresses:
        read_admin_over(tls_ca, tls_cert, tls_key, address)
        if worker is None:
            _show(ask_router_json(address, _PAGE, timeout_s=TIMEOUT_S)["lost"])
            continue
        change = {"worker": worker, "epoch": epoch}
        try:
            done: Any = ask_router_json(address, _PAGE, change, timeout_s=TIMEOUT_S)
        except OperatorCallError as error:  # The other routers may know it.
            refused.append(f"{address}: {error}")
            continue
        _print(f"{done['worker']} of epoch {done['epoch']}: gone, its pages are free again")
    if refused:
        raise OperatorCallError("; ".join(refused))


def _show(lost: list[dict[str, Any]]) -> None:
    if not lost:
        stderr.print("no worker is lost whose end nobody has seen")
    for one in lost:
        since = time.strftime("%H:%M:%S", time.localtime(one["since"]))
        line = f"{one['worker']}  {one['epoch']}  lost {since}  {one['processes']} processes unseen"
        _print(line)


def _print(line: str) -> None:
    stdout.print(line, highlight=False, markup=False, soft_wrap=True)
