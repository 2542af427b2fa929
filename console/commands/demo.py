"""`baton demo`: sends one question through the whole system and shows where its time went."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, TextIO

import typer

from baton.client.clients import Client
from baton.client.options import Options
from console import up
from console.commands.ask import stream_answer, turns
from console.commands.trace import show_trace
from serving.models import demo_model, finding
from serving.output import model_progress, stderr, stdout

LOG_TAIL_LINES = 30
KV_MEMORY_GIB = 0.25
"""Enough for one question. A small pool starts fast, since pools are zeroed at start."""


def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = "What is the capital of France?",
    model: Annotated[
        str, typer.Option(help="Folder of the model; `demo` fetches a small one.")
    ] = demo_model.DEMO,
    tp: Annotated[
        int, typer.Option(min=1, help="Ranks of each worker: processes that divide the model.")
    ] = 1,
    device: Annotated[up.Device, typer.Option(help="`auto`: GPUs where there are any.")] = "auto",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 128,
) -> None:
    """Start a router, a prefill and a decode worker, ask one question, stop everything.

    The three are separate processes on free ports. One worker computes the prompt and sends its KV
    pages to the other, which generates the answer. The waterfall is drawn from their spans.

    Example: [cyan]baton demo "Why is the sky blue?"[/]
    """
    with model_progress() as progress:
        found = finding.find(model, progress)
    options = up.UpOptions(
        model=found.path,
        tp=tp,
        device=device,
        grpc_port=0,
        http_port=0,
        admin_port=0,
        kv_memory_gib=KV_MEMORY_GIB,
        drain_s=10.0,
    )
    plan = up.plan(options)
    log = demo_model.cache_folder() / "demo.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        try:
            asyncio.run(_demo(plan, prompt, max_tokens, file))
        except up.UpError as error:
            file.flush()
            raise up.UpError(f"{error}\n\n{_tail(log)}\n\nThe whole log: {log}") from None


async def _demo(plan: up.UpPlan, prompt: str, max_tokens: int, log: TextIO) -> None:
    def write(name: str, line: str) -> None:
        log.write(f"{name:>9} | {line}\n")

    started = time.monotonic()
    async with up.running(plan, write) as supervisor:
        with stderr.status("starting a router, a prefill and a decode worker") as status:
            await up.wait_until_ready(
                plan, supervisor, lambda names: status.update(f"waiting for {names}")
            )
        stderr.print(
            f"router, prefill and decode are up after {time.monotonic() - started:.1f} s "
            f"(processes {', '.join(map(str, supervisor.pids().values()))})\n",
            style="dim",
        )
        await asyncio.to_thread(_ask, plan, prompt, max_tokens)


def _ask(plan: up.UpPlan, prompt: str, max_tokens: int) -> None:
    stdout.print(f"> {prompt}", style="bold", markup=False)
    options = Options(max_tokens=max_tokens, temperature=0.0)
    with Client(plan.router_address) as client:
        generation = stream_answer(client, None, turns(prompt), options, timeout_s=120)
    stdout.print()
    show_trace(generation.trace_id, plan.admin_address)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8").splitlines()[-LOG_TAIL_LINES:])
