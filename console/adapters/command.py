"""`baton adapters`: lists the workers' adapters, loads and unloads them."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from console.commands.tls_options import CaOption, CertOption, KeyOption, read_admin_over
from console.commands.trace import ROUTER_ADMIN_ADDRESS, AdminOption
from console.operator_calls import ask_router, ask_router_json
from serving.output import stderr, stdout

ANSWER_S: Final = 260.0
"""Workers read the adapter meanwhile, and undo it if one cannot: the router gives all of them 120 s
for each of the two."""
_FORMS: Final = {"list": (), "load": ("NAME", "FOLDER"), "unload": ("NAME",)}


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
        _show(ask_router_json(address, "/adapters", timeout_s=ANSWER_S)["adapters"])
        return
    body: dict[str, Any] = {"lora_name": name}
    if action == "load":
        body |= {"lora_path": folder, "base_model_name": model, "load_inplace": replace}
    said = ask_router(address, f"/v1/{action}_lora_adapter", body, timeout_s=ANSWER_S)
    stdout.print(said, highlight=False, markup=False)


def _show(found: list[dict[str, Any]]) -> None:
    if not found:
        stderr.print("no worker has an adapter")
    for one in found:
        contents = {digest[:12] for digest in one["workers"].values()}
        count = len(one["workers"])
        where = f"{count} worker{'s' * (count > 1)}"
        line = f"{one['name']}  {one['model']}  {' '.join(sorted(contents))}  {where}"
        stdout.print(line, highlight=False, markup=False, soft_wrap=True)
