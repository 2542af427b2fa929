"""Commands that talk to a running router: `generate` and `models`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from baton.addresses import ROUTER_ADDRESS
from baton.client.channels import check_address
from baton.client.clients import Client, check_token
from baton.client.generation import Generation
from baton.client.options import Message, Options
from baton.tls import TlsFiles
from console.commands.tls_options import CaOption, CertOption, KeyOption, grpc_files
from console.commands.trace import AdminOption, show_trace
from serving.output import print_json, stderr, stdout


def _checked(check: Callable[[str], str]) -> Callable[[str], str]:
    """Makes an option's callback that reports a ValueError of `check` as wrong use."""

    def callback(value: str) -> str:
        try:
            return check(value)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return callback


RouterOption = Annotated[
    str,
    typer.Option(
        "--router",
        envvar="BATON_ROUTER",
        metavar="HOST:PORT",
        callback=_checked(check_address),
        help="Router to ask; grpcs://HOST:PORT where it speaks TLS.",
    ),
]

TokenOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        "--token",
        envvar=["BATON_API_KEY", "BATON_TOKEN"],
        callback=_checked(check_token),
        help="Key or token to show, where the router asks for one.",
    ),
]


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; `-` reads standard input.")],
    router: RouterOption = ROUTER_ADDRESS,
    model: Annotated[str, typer.Option(help="Model name. Default: the only one served.")] = "",
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Use the chat template, or the text as it is.")
    ] = True,
    system: Annotated[str, typer.Option(help="System message of the chat.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Sample from this share, in (0, 1].")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends generation.")] = None,
    beams: Annotated[
        int | None, typer.Option(min=1, help="Search with so many beams, and print the best find.")
    ] = None,
    timeout_s: Annotated[
        float | None, typer.Option(min=0.001, help="Give up after this long.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")
    ] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Draw the request's waterfall afterwards.")
    ] = False,
    admin: AdminOption = None,
    token: TokenOption = "",
    tls_ca: CaOption = "",
    tls_cert: CertOption = "",
    tls_key: KeyOption = "",
) -> None:
    """Ask a running router and stream the answer.

    The text goes to stdout, all else to stderr. Ctrl-C cancels the generation.

    Example: [cyan]baton generate "Write a haiku about a relay race" --temperature 0.8 --seed 7[/]

    Example: [cyan]echo "The capital of France is" | baton generate - --raw --max-tokens 8[/]
    """
    if system and not chat:
        raise typer.BadParameter("a raw prompt has no place for a system message")
    text = sys.stdin.read() if prompt == "-" else prompt
    options = Options(model=model, max_tokens=max_tokens, temperature=temperature, stop=stop or ())
    if top_p is not None:
        options["top_p"] = top_p
    if seed is not None:
        options["seed"] = seed
    if beams is not None:
        options["beams"] = beams
    files = grpc_files(tls_ca, tls_cert, tls_key, router)
    with _client(router, token, files) as client:
        answer = stream_answer if beams is None else whole_answer
        generation = answer(
            client,
            None if chat else text,
            turns(text, system) if chat else None,
            options,
            timeout_s=timeout_s,
            echo=not as_json,
        )
    if as_json:
        print_json(asdict(generation) | {"text": generation.text})
    if trace:
        show_trace(generation.trace_id, admin)


def _client(router: str, token: str, files: TlsFiles) -> Client:
    ca, cert, key, _ = files
    return Client(router, token=token, tls_ca=ca, tls_cert=cert, tls_key=key)


def turns(text: str, system: str = "") -> list[Message]:
    """Makes a chat of one question."""
    asked: list[Message] = [{"role": "user", "content": text}]
    return [{"role": "system", "content": system}, *asked] if system else asked


def stream_answer(
    client: Client,
    prompt: str | None,
    messages: list[Message] | None,
    options: Options,
    *,
    timeout_s: float | None = None,
    echo: bool = True,
) -> Generation:
    """Streams one answer to stdout, and writes a summary to stderr."""
    started = time.monotonic()
    first_text_s = 0.0
    try:
        stream = client.stream(prompt, messages=messages, timeout_s=timeout_s, **options)
    except ValueError as error:  # A number is too large, or text is not UTF-8.
        raise typer.BadParameter(str(error)) from None
    with stream:
        try:
            for delta in stream:
                first_text_s = first_text_s or time.monotonic() - started
                if echo:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
        finally:
            if echo and first_text_s:  # Later output, or an error, begins a new line.
                sys.stdout.write("\n")
                sys.stdout.flush()
        generation = stream.result
    if echo:
        _sum_up(generation, first_text_s, time.monotonic() - started)
    return generation


def whole_answer(
    client: Client,
    prompt: str | None,
    messages: list[Message] | None,
    options: Options,
    *,
    timeout_s: float | None = None,
    echo: bool = True,
) -> Generation:
    """Writes one answer to stdout when all of it is known, and a summary to stderr."""
    started = time.monotonic()
    try:
        generation = client.generate(prompt, messages=messages, timeout_s=timeout_s, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if echo:
        print(generation.text)
        _sum_up(generation, 0.0, time.monotonic() - started)
    return generation


def _sum_up(generation: Generation, first_text_s: float, total_s: float) -> None:
    usage = generation.usage
    parts = [
        f"{usage.prompt_tokens} prompt + {usage.output_tokens} output tokens",
        f"first text after {(first_text_s or total_s) * 1e3:.0f} ms",
    ]
    if first_text_s and usage.output_tokens > 1 and total_s > first_text_s:
        parts.append(f"then {(usage.output_tokens - 1) / (total_s - first_text_s):.0f} tokens/s")
    parts.append(f"trace {generation.trace_id}")
    stderr.print(" · ".join(parts), style="dim")


def models(
    router: RouterOption = ROUTER_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    token: TokenOption = "",
    tls_ca: CaOption = "",
    tls_cert: CertOption = "",
    tls_key: KeyOption = "",
) -> None:
    """List the models and adapters that a running router serves.

    The revision of an adapter is its digest.
    """
    files = grpc_files(tls_ca, tls_cert, tls_key, router)
    with _client(router, token, files) as client:
        served = client.models()
    if as_json:
        print_json([asdict(model) for model in served])
        return
    if not served:
        stderr.print("no model is served yet, or none to this caller")
        return
    table = Table(
        *("model", "adapts", "revision", "context", "longest output", "tokenizer"), box=None
    )
    for model in served:
        table.add_row(
            model.name,
            model.parent,
            (model.digest or model.revision)[:12],
            f"{model.max_context_tokens:,}",
            f"{model.max_output_tokens:,}",
            "yes" if model.has_tokenizer else "no",
        )
    stdout.print(table)
