"""`baton bench`: puts load on a server and measures it as a client."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from baton.addresses import ROUTER_ADDRESS
from baton.client.clients import LONGEST_S
from baton.tls import TlsFiles
from console.commands.tls_options import (
    CaOption,
    CertOption,
    KeyOption,
    checked_files,
)
from console.commands.trace import checked_admin
from console.loadgen.errors import BenchError, WrongUseError
from console.settings_options import takes_options
from serving.installing import install_line
from serving.output import print_json, stderr, stdout
from serving.settings import MOST_TOKENS

if TYPE_CHECKING:
    from console.loadgen.benchmark import BenchOptions, Result
    from console.loadgen.endpoints import Target
    from console.loadgen.workload import Conversations, Workload

NOT_VALID = 1
"""Exit code if nothing was served, or if the client was the bottleneck."""
PROBE_S = 60.0
"""Default duration of each run of a search."""
_load, _slo, _client = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Load", "Service levels", "Client")
)


class Arrivals(StrEnum):
    """Kinds of arrivals."""

    POISSON = "poisson"
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Given:
    """The options of the command line."""

    url: Annotated[
        list[str],
        typer.Option(
            "--url",
            "--router",
            envvar="BATON_ROUTER",
            help="HOST:PORT or grpc://HOST:PORT (grpcs:// with TLS), or http://HOST:PORT/v1 of any "
            "OpenAI-compatible server. Several take requests in turn.",
        ),
    ] = field(default_factory=lambda: [f"grpc://{ROUTER_ADDRESS}"])
    model: Annotated[str, typer.Option(help="Model name. Default: the only one served.")] = ""
    rate: Annotated[
        float,
        _load(min=0, help="Requests a second. 0: the trace's own times, else one after another."),
    ] = 0.0
    num: Annotated[
        int | None,
        _load(min=1, help="Requests of a run. Default: 100, or all of a trace at its own times."),
    ] = None
    duration_s: Annotated[
        float | None,
        _load(
            min=0,
            help="Leave out requests due later. Default: no limit; in a search, 60 a run.",
        ),
    ] = None
    prompt_tokens: Annotated[int, _load(min=1, max=MOST_TOKENS, help="Length of every prompt.")] = (
        1024
    )
    output_tokens: Annotated[int, _load(min=1, max=MOST_TOKENS, help="Length of every answer.")] = (
        128
    )
    conversations: Annotated[
        int,
        _load(
            min=0,
            help="Have so many conversations instead: each prompt is the one before, its answer's "
            "own tokens, and a new message. --rate: conversations begun a second; 0: all at once.",
        ),
    ] = 0
    turns: Annotated[int, _load(min=1, help="Turns of a conversation.")] = 8
    think: Annotated[
        float,
        _load(min=0, help="Mean seconds between an answer's end and the next turn, exponential."),
    ] = 0.0
    system_tokens: Annotated[
        int, _load(min=0, max=MOST_TOKENS, help="Prompt that all conversations begin with.")
    ] = 512
    user_median: Annotated[
        float, _load(min=1, help="Median length of users' messages, which is log-normal.")
    ] = 37.0
    user_p90: Annotated[float, _load(min=1, help="Its 90th percentile.")] = 4900.0
    context: Annotated[
        int,
        _load(min=0, help="Most tokens of a conversation; 0: the model's context."),
    ] = 0
    trace: Annotated[
        str,
        _load(
            help="Lengths from a trace: azure-conversation, mooncake-conversation, or a file in "
            "the form of these (.csv, .jsonl, .gz). Shared prefixes are kept."
        ),
    ] = ""
    arrivals: Annotated[
        Arrivals | None,
        _load(
            help="How requests arrive. `trace` uses the trace's own times, stretched to --rate if "
            "that is set. Default: `trace` where there is a trace and no rate."
        ),
    ] = None
    time_scale: Annotated[
        float, _load(min=1e-3, help="Stretches a trace's own times: 0.5 is twice as fast.")
    ] = 1.0
    repeats: Annotated[int, _load(min=1, help="Runs, each with a seed of its own.")] = 1
    seed: Annotated[
        int | None,
        _load(
            min=0,
            help="Seed of arrivals and prompts. Default: a fresh one. A seed used before finds "
            "its prompts in prefix caches.",
        ),
    ] = None
    vocabulary: Annotated[int, _load(min=16, max=1 << 31, help="Token ids are drawn below it.")] = (
        32_000
    )
    force_length: Annotated[
        bool, _load("--force-length/--natural-length", help="Go on past the end of sequence.")
    ] = True
    slo_ttft_ms: Annotated[float | None, _slo(min=0.001, help="Time to first token.")] = None
    slo_itl_p99_ms: Annotated[
        float | None, _slo(min=0.001, help="99th percentile of each request's own gaps.")
    ] = None
    slo_tpot_ms: Annotated[
        float | None, _slo(min=0.001, help="Mean time of a token after the first.")
    ] = None
    slo_e2e_ms: Annotated[float | None, _slo(min=0.001, help="Time to the last token.")] = None
    goodput: Annotated[
        bool,
        _slo(
            "--goodput",
            help="Search the highest rate that keeps the service levels, from --rate on.",
        ),
    ] = False
    attainment: Annotated[
        float, _slo(min=0.01, max=1, help="Share of the requests that must keep them.")
    ] = 0.9
    tolerance: Annotated[float, _slo(min=0.001, help="Precision of goodput, as a share.")] = 0.05
    max_probes: Annotated[int, _slo(min=1, help="Most runs of a search.")] = 16
    simulate_idle_ttft_ms: Annotated[
        float | None,
        _slo(
            min=0.001,
            help="Add a row: TTFT of one server with one queue that takes this long, on the same "
            "arrivals.",
        ),
    ] = None
    senders: Annotated[
        int | None,
        _client(min=1, help="Sender processes. Default: a quarter of the cores, at most 8."),
    ] = None
    warm_ups: Annotated[int, _client(min=0, help="Requests of each sender before a run.")] = 4
    timeout_s: Annotated[float, _client(min=0.1, max=LONGEST_S, help="Limit of one request.")] = (
        120.0
    )
    max_lag_ms: Annotated[
        float | None,
        _client(
            help="A client later than this at p99 makes the result invalid. Default: a fifth of "
            "the median time between tokens, at least 5."
        ),
    ] = None
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token, where one is asked for.")
    ] = ""
    tls_ca: CaOption = ""
    tls_cert: CertOption = ""
    tls_key: KeyOption = ""
    admin: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            callback=checked_admin,
            help="A router's admin address: sum up the spans of the last requests, too.",
        ),
    ] = ""
    report: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, help="Folder for report.html, its plots as PNG, and result.json."
        ),
    ] = None
    requests: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="File for every request's times, one JSON line each."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False

    @property
    def seconds(self) -> float:
        """Requests due later are left out; 0: no request is."""
        if self.duration_s is not None:
            return self.duration_s
        return PROBE_S if self.goodput else 0.0


@takes_options(Given)
def bench(given: Given) -> None:
    """Put load on a server and measure it as its clients see it.

    Each request is sent when it is due, even if earlier ones are still running: a slow server is
    not spared. Prompts are random token ids, new for every request.

    Example: [cyan]baton bench --rate 4 --num 300 --prompt-tokens 1024 --output-tokens 256[/]

    Example: [cyan]baton bench --trace mooncake-conversation --time-scale 2 --report out[/]

    Example: [cyan]baton bench --conversations 64 --turns 8 --think 5 --context 8192 --rate 2[/]

    Example: [cyan]baton bench --url http://peer:8000/v1 --trace azure-conversation --rate 2
    --goodput --slo-ttft-ms 400 --slo-itl-p99-ms 10[/]
    """
    _need("numpy")
    from console.loadgen.benchmark import measure
    from console.loadgen.endpoints import parse_url
    from console.loadgen.report.show import progress_bar, render

    targets = tuple(map(parse_url, given.url))
    if any(target.protocol == "openai" for target in targets):
        _need("aiohttp")
    if given.report is not None:
        _need("matplotlib")
    options = _options(given, targets)
    _check_places(given)
    with progress_bar() as watcher:
        result = measure(options, watcher)
    _hand_out(result, render(result), given)


def _check_places(given: Given) -> None:
    """Raises OSError if results could not be written, before a run that may take hours."""
    if given.report is not None:
        given.report.mkdir(parents=True, exist_ok=True)
    if given.requests is not None:
        given.requests.touch()


def _need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise BenchError(f"this needs {module}: {install_line('bench')}")


def _options(given: Given, targets: tuple[Target, ...]) -> BenchOptions:
    from console.loadgen.benchmark import BenchOptions, SearchOptions
    from console.loadgen.fleet import usual_senders
    from console.loadgen.report.summary import Slo

    search = SearchOptions(given.attainment, given.tolerance, given.max_probes)
    return BenchOptions(
        targets=targets,
        workload=_workload(given),
        rate=given.rate,
        repeats=given.repeats,
        model=given.model,
        api_key=given.api_key,
        files=_files(given, targets),
        vocabulary=given.vocabulary,
        force_length=given.force_length,
        senders=given.senders or usual_senders(),
        warm_ups=given.warm_ups,
        timeout_s=given.timeout_s,
        slo=Slo(given.slo_ttft_ms, given.slo_itl_p99_ms, given.slo_tpot_ms, given.slo_e2e_ms),
        search=search if given.goodput else None,
        idle_ttft_ms=given.simulate_idle_ttft_ms,
        max_lag_ms=given.max_lag_ms,
        admin=given.admin,
        **({} if given.seed is None else {"seed": given.seed}),
    )


def _files(given: Given, targets: tuple[Target, ...]) -> TlsFiles:
    for target in targets:
        checked_files(
            given.tls_ca, given.tls_cert, given.tls_key, target.address, "grpcs://", "https://"
        )
    return TlsFiles(given.tls_ca, given.tls_cert, given.tls_key)


def _workload(given: Given) -> Workload | Conversations:
    if given.conversations:
        return _conversations(given)
    from console.loadgen.trace_files import read_trace
    from console.loadgen.workload import DEFAULT_NUM, Workload, scaled

    rows = scaled(read_trace(given.trace), given.time_scale) if given.trace else ()
    is_own = given.arrivals is Arrivals.TRACE
    is_own |= given.arrivals is None and bool(rows) and not given.rate
    return Workload(
        num=given.num or (0 if is_own else DEFAULT_NUM),
        prompt_tokens=given.prompt_tokens,
        output_tokens=given.output_tokens,
        trace=rows,
        trace_arrivals=is_own,
        duration_s=given.seconds,
    )


def _conversations(given: Given) -> Conversations:
    from console.loadgen.workload import Conversations

    if given.trace or given.num or given.goodput:
        raise WrongUseError("--conversations goes without --trace, --num and --goodput")
    return Conversations(
        conversations=given.conversations,
        turns=given.turns,
        think_s=given.think,
        output_tokens=given.output_tokens,
        system_tokens=given.system_tokens,
        median_tokens=given.user_median,
        p90_tokens=given.user_p90,
        context_tokens=given.context or MOST_TOKENS,
    )


def _hand_out(result: Result, table: object, given: Given) -> None:
    from console.loadgen.benchmark import as_json as result_json
    from console.loadgen.benchmark import request_lines

    found = result_json(result)
    if given.as_json:
        print_json(found)
    else:
        stdout.print(table, soft_wrap=False)
    if given.requests is not None:
        lines = (json.dumps(line) + "\n" for line in request_lines(result))
        given.requests.write_text("".join(lines), encoding="utf-8")
    if (report := given.report) is not None:
        from console.loadgen.report.report import write_report

        page = write_report(result, report)
        (report / "result.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
        stderr.print(f"report: {page}")
    if given.admin and not result.spans.get("requests"):
        stderr.print(f"no spans: {given.admin} has none of these requests, or does not answer")
    if result.unserved:
        stderr.print(f"[bold red]not valid[/]: {escape(result.unserved)}")
    for complaint in result.complaints:
        stderr.print(f"[bold red]not valid[/]: {result.bottleneck}: {complaint}")
    if result.unserved or result.complaints:
        raise typer.Exit(NOT_VALID)
