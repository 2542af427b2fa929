"""Open-loop load on a router's gRPC door: token ids in, tokens streamed out, lengths forced.

python -m bench.serve_load ROUTER --rate R --num N --isl I --osl O [--traces ADMIN] [--out FILE]

Requests arrive as a Poisson process of `--rate` a second, whatever became of those before; rate 0
sends one after another. Every prompt is random and new, so that no prefix cache helps. Runs in a
process of its own; `lag_ms` says how late it sent requests, and so whether it was the bottleneck.

Times are taken at the client. TTFT is from sending the request to the first token; the second-token
gap from the first token to the second, which is where a hand-off shows; ITL between messages; TPOT
from the first token to the last, a token. With `--traces`, spans of up to `TRACES_READ` requests
are read from the router's admin port afterwards, and their durations and figures summed up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton import traces
from baton.client import AsyncClient
from baton.errors import BatonError

TRACES_READ = 48
WARM_UPS = 4


@dataclass
class Outcome:
    """One request as its client saw it; times in seconds of `time.perf_counter`."""

    due_s: float
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """Of messages that carry tokens."""
    tokens: int = 0
    trace_id: str = ""
    error: str = ""


async def request(client: AsyncClient, prompt: Sequence[int], osl: int, due_s: float) -> Outcome:
    """Runs one request to its end."""
    outcome = Outcome(due_s, time.perf_counter())
    stream = client.stream(
        token_ids=prompt,
        max_tokens=osl,
        min_tokens=osl,
        ignore_eos=True,
        temperature=0.0,
        timeout_s=120.0,
    )
    try:
        async for delta in stream:
            outcome.arrivals_s.append(time.perf_counter())
            outcome.tokens += len(delta.token_ids)
    except BatonError as error:
        outcome.error = type(error).__name__
    outcome.trace_id = stream.trace_id
    return outcome


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Warms up, runs the load, and sums it up."""
    rng = np.random.default_rng(arguments.seed)

    def prompt() -> list[int]:
        ids: list[int] = rng.integers(10, arguments.vocabulary, arguments.isl).tolist()
        return ids

    async with AsyncClient(arguments.router, retries=False) as client:
        for _ in range(WARM_UPS):
            await request(client, prompt(), arguments.osl, time.perf_counter())
        prompts = [prompt() for _ in range(arguments.num)]
        begin_s = time.perf_counter()
        if arguments.rate > 0:
            gaps_s = rng.exponential(1 / arguments.rate, arguments.num)
            due_s = (begin_s + np.cumsum(gaps_s)).tolist()
            outcomes = await open_loop(client, prompts, due_s, arguments.osl)
        else:
            outcomes = [
                await request(client, ids, arguments.osl, time.perf_counter()) for ids in prompts
            ]
        wall_s = time.perf_counter() - begin_s
    result = summary(outcomes, wall_s, vars(arguments))
    if arguments.traces:
        ids = [outcome.trace_id for outcome in outcomes[-TRACES_READ:] if outcome.trace_id]
        result["spans"] = await asyncio.to_thread(span_figures, arguments.traces, ids)
    return result


async def open_loop(
    client: AsyncClient, prompts: Sequence[Sequence[int]], due_s: Sequence[float], osl: int
) -> list[Outcome]:
    """Sends each prompt when it is due."""
    tasks = []
    for ids, when_s in zip(prompts, due_s, strict=True):
        await asyncio.sleep(max(0.0, when_s - time.perf_counter()))
        tasks.append(asyncio.create_task(request(client, ids, osl, when_s)))
    return list(await asyncio.gather(*tasks))


def summary(outcomes: Sequence[Outcome], wall_s: float, asked: dict[str, Any]) -> dict[str, Any]:
    """Percentiles in ms over the requests that got all their tokens."""
    good = [o for o in outcomes if not o.error and o.tokens == asked["osl"]]
    gaps = [np.diff(o.arrivals_s) for o in good if len(o.arrivals_s) > 1]
    return {
        **{name: asked[name] for name in ("rate", "num", "isl", "osl", "seed")},
        "ok": len(good),
        "errors": sorted({o.error or "short" for o in outcomes if o not in good}),
        "wall_s": round(wall_s, 2),
        "output_tokens_per_s": round(sum(o.tokens for o in good) / wall_s, 1),
        "ttft_ms": percentiles([o.arrivals_s[0] - o.sent_s for o in good]),
        "second_gap_ms": percentiles([gap[0] for gap in gaps]),
        "itl_ms": percentiles(np.concatenate(gaps) if gaps else []),
        "tpot_ms": percentiles(
            [(o.arrivals_s[-1] - o.arrivals_s[0]) / max(1, o.tokens - 1) for o in good]
        ),
        "e2e_ms": percentiles([o.arrivals_s[-1] - o.sent_s for o in good]),
        "lag_ms": percentiles([o.sent_s - o.due_s for o in outcomes]),
        "tokens_per_message": round(
            sum(o.tokens for o in good) / max(1, sum(len(o.arrivals_s) for o in good)), 3
        ),
    }


def percentiles(seconds: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    """Median, 99th percentile and largest, in ms."""
    if len(seconds) == 0:
        return {}
    p50, p99, largest = 1e3 * np.percentile(seconds, (50, 99, 100))
    return {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(largest, 2)}


def span_figures(admin: str, trace_ids: Sequence[str]) -> dict[str, Any]:
    """Per span name, median and largest of its duration and of each figure it carries."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    transports = set()
    for trace_id in trace_ids:
        try:
            trace = traces.fetch(admin, trace_id, patience_s=1.0)
        except traces.TraceError:
            continue
        for span in trace.spans:
            figures = found[span.name]
            figures["duration_ms"].append(span.duration_ns / 1e6)
            for key, value in span.attributes.items():
                if key == "baton.kv.transport":
                    transports.add(str(value))
                elif key.startswith("baton.") and isinstance(value, int | float):
                    figures[key].append(float(value))
    medians = {
        name: {
            key: [round(float(np.median(values)), 3), round(max(values), 3)]
            for key, values in figures.items()
        }
        for name, figures in found.items()
    }
    return {"transports": sorted(transports), "median_and_max": medians}


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("router", help="HOST:PORT of the gRPC door")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: in turn")
    parser.add_argument("--num", type=int, default=64)
    parser.add_argument("--isl", type=int, default=1024, help="prompt tokens")
    parser.add_argument("--osl", type=int, default=128, help="output tokens")
    parser.add_argument("--vocabulary", type=int, default=49_000, help="ids are drawn below it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--traces", default="", help="HOST:PORT of the router's admin port")
    parser.add_argument("--out", help="append the JSON to this file, too")
    arguments = parser.parse_args()
    result = asyncio.run(run(arguments))
    if arguments.out:
        with open(arguments.out, "a") as file:
            print(json.dumps(result), file=file)
    result.pop("spans", None)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
