"""The progress of many prompts on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from baton.client.generation import Generation
from worker.loading import terminal


@contextmanager
def bar(prompts: int) -> Iterator[Callable[[Generation], None]]:
    """Draws the progress of many prompts on a terminal. Yields a callback for finished prompts."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = terminal("text")
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), "{task.fields[rate]}")
    began_s, tokens = time.monotonic(), 0
    with Progress(*columns, console=console, transient=True, disable=console is None) as shown:
        task = shown.add_task("", total=prompts, rate="")

        def done(generation: Generation) -> None:
            nonlocal tokens
            tokens += generation.usage.output_tokens
            rate = tokens / (time.monotonic() - began_s)
            shown.update(task, advance=1, rate=f"{rate:,.0f} tokens/s")

        yield done
