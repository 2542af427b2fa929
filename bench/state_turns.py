"""A model whose layers keep states, over processes: next turns, and what a hand-off adds.

python -m bench.state_turns turns [--json FILE]
    Conversations of a prompt and an answer, then their next turns, on a prefill and a decode
    worker: how much of the next prompt was found, and how much KV was there without a state.
python -m bench.state_turns exposed [--json FILE]
    Prompts one after the other: milliseconds from the end of the last chunk's compute to the last
    push seen done, of this model and of one that keeps K and V alone, in turns.

Both run on a CPU as they are; on a GPU with `--device cuda`, `--model` and `--dense`. Weights are
dummies.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from baton.client.clients import Client
from bench import turn_traces
from bench.harness import Figures, Up, table, warm_up, write_json
from telemetry.names import Attr, Metric, SpanName

VOCABULARY = 4000
"""Ids that the tiny shapes know."""
AT_ONCE = 10
"""Conversations that are open at a time."""
WORKERS = (1, 1, 0)
"""A prefill worker and a decode worker."""


def _ids(rng: np.random.Generator, count: int) -> list[int]:
    return list(map(int, rng.integers(10, VOCABULARY, count)))


def turns(options: argparse.Namespace) -> dict[str, Any]:
    """The next turns of conversations."""
    rng = np.random.default_rng(options.seed)
    prompts = [_ids(rng, options.prompt) for _ in range(options.conversations)]
    messages = [_ids(rng, options.message) for _ in prompts]

    def ask(ids: Sequence[int]) -> tuple[list[int], int]:
        """The answer, and the tokens of the prompt that were found."""
        made = client.generate(
            token_ids=ids, max_tokens=options.answer, temperature=0.0, ignore_eos=True
        )
        return list(made.token_ids), made.usage.cached_prompt_tokens

    with Up(options.policy, options, WORKERS) as up, Client(up.address) as client:
        warm_up(client)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = [answer for answer, _ in pool.map(ask, prompts)]
            before = up.figures()
            asked = [
                [*prompt, *answer, *message]
                for prompt, answer, message in zip(prompts, answers, messages, strict=True)
            ]
            found = [cached for _, cached in pool.map(ask, asked)]
        after = up.figures()
    tokens = sum(map(len, asked))
    unresumable = _grown(before, after, Metric.UNRESUMABLE_TOKENS + "_total")
    return {
        "conversations": len(asked),
        "tokens": tokens,
        "found": sum(found) / tokens,
        "least": min(cached / len(ids) for cached, ids in zip(found, asked, strict=True)),
        "kv_without_state": unresumable / tokens,
        "fetched": _grown(before, after, Metric.FETCHES + "_total", "fetched"),
    }


def _grown(before: Figures, after: Figures, name: str, labels: str = "") -> float:
    return sum(
        value - before.get(key, 0.0)
        for key, value in after.items()
        if key[1] == name and (not labels or key[2] == labels)
    )


def exposed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Hand-offs of both models, in turns."""
    return [
        {"model": Path(model).name, **_exposed(options, model, turn)}
        for turn in range(options.turns)
        for model in (options.model, options.dense)[:: 1 if turn % 2 == 0 else -1]
    ]


def _exposed(options: argparse.Namespace, model: str, turn: int) -> dict[str, Any]:
    rng = np.random.default_rng(options.seed + turn)
    own = argparse.Namespace(**{**vars(options), "model": model})
    with Up("least_work", own, WORKERS) as up, Client(up.address) as client:
        warm_up(client)
        began_ns = time.time_ns()
        for _ in range(options.count):
            client.generate(token_ids=_ids(rng, options.prompt), max_tokens=8, ignore_eos=True)
        time.sleep(1.0)  # The last spans are on their way.
        spans = [
            span
            for trace in turn_traces.read(up.admin, began_ns)
            for span in trace.named(SpanName.KV_SEND)
        ]
    waited = [float(span.attributes[Attr.KV_EXPOSED_MS]) for span in spans]
    return {
        "count": len(waited),
        "exposed_ms": statistics.median(waited),
        "longest_ms": max(waited),
        "mib": statistics.median(float(span.attributes[Attr.KV_BYTES]) for span in spans)
        / (1 << 20),
    }


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("turns", "exposed"))
    parser.add_argument("--model", default="bench/shapes/tiny-hybrid")
    parser.add_argument("--dense", default="bench/shapes/tiny", help="keeps K and V alone")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--policy", default="least_work", help="of the router, for turns")
    parser.add_argument("--conversations", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--answer", type=int, default=250, help="tokens")
    parser.add_argument("--message", type=int, default=100, help="tokens of the next turn")
    parser.add_argument("--count", type=int, default=40, help="prompts of a model in a turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--kv-gib", type=float, default=0.5)
    parser.add_argument("--host-gib", type=float, default=0.2)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [turns(options)] if options.what == "turns" else exposed(options)
    print(table([list(found[0]), *(list(row.values()) for row in found)]))
    write_json(options.json, found)


if __name__ == "__main__":
    main()
