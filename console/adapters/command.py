"""`baton adapters`: lists the workers' adapters, loads and unloads them."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from typing import Annotated, Any, Final

import typer

from console.commands.tls_options import CaOption, CertOption, KeyOption, read_admin_over
from console.commands.trace import ROUTER_ADMIN_ADDRESS, AdminOption
from console.roles.command import TOKEN_VARIABLE
from console.top.scrape import base_url
from serving.output import stdout

ANSWER_S: Final = 260.0
"""Workers read the adapter meanwhile, and undo it if one cannot: the router gives them 120 s for
each."""
_FORMS: Final = {"list": (), "load": ("NAME", "FOLDER"), "unload": ("NAME",)}


class AdapterCommandError(Exception):
    """It was not done. The message says why."""


def adapters(
    action: Annotated[str, typer.Argument(help="list, load or unload.")] = "list",
    name: Annotated[str, typer.Argument(help="By which requests choose it.")] = "",
    folder: Annotated[
        str, typer.Argument(help="In peft's format, below the workers' adapters_dir.")
    ] = "",
    model: Annotated[str, typer.Option(help="Whose it is, if several take adapters.")] = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the place of another content of that name.")
    ] = False,
    admin: AdminOption = None,
    tls_ca: CaOption = "",
    tls_cert: CertOption = "",
    tls_key: KeyOption = "",
) -> None:
    """Show the workers' adapters (LoRA), load one on all workers of a model, or unload one.

    Requests under way end with the content with which they began. BATON_OPERATOR_TOKEN must be the
    router's operator token, and the workers have --adapters-dir.

    Example: [cyan]baton adapters load law law-v2[/]
    """
    address = (admin or ROUTER_ADMIN_ADDRESS).partition(",")[0]
    read_admin_over(tls_ca, tls_cert, tls_key, address)
    form = _FORMS.get(action)
    if form is None or [bool(name), bool(folder)] != [len(form) > 0, len(form) > 1]:
        forms = "; ".join(" ".join((each, *rest)) for each, rest in _FORMS.items())
        raise typer.BadParameter(f"write one of: {forms}")
    if action == "list":
        _show(json.loads(_ask(address, "/adapters"))["adapters"])
        return
    body: dict[str, Any] = {"lora_name": name}
    if action == "load":
        body |= {"lora_path": folder, "base_model_name": model, "load_inplace": replace}
    stdout.print(_ask(address, f"/v1/{action}_lora_adapter", body), highlight=False, markup=False)


def _show(found: list[dict[str, Any]]) -> None:
    for one in found:
        contents = {digest[:12] for digest in one["workers"].values()}
        where = f"{len(one['workers'])} workers"
        line = f"{one['name']}  {one['model']}  {' '.join(sorted(contents))}  {where}"
        stdout.print(line, highlight=False, markup=False, soft_wrap=True)


def _ask(admin: str, path: str, change: dict[str, Any] | None = None) -> str:
    """What the router answers.

    Raises:
        AdapterCommandError: it refuses, or does not answer.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    url, body = f"{base_url(admin)}{path}", json.dumps(change).encode() if change else None
    request = urllib.request.Request(url, body, {"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            raise AdapterCommandError(_why(error.code, error.read(), url)) from None
    except (OSError, ValueError):
        raise AdapterCommandError(f"{url} does not answer: does the router run there?") from None


def _why(status: int, body: bytes, url: str) -> str:
    if status == 403:
        return f"this needs the router's operator token: set {TOKEN_VARIABLE} here and there"
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"{url} answered {status}: is this a router's admin port?"
