"""The policies `cost` and `least_work` on two P and two D of this host, in the same requests.

python -m bench.next_turn conversations [--policies least_work cost] [--rate 2]
    conversations whose prompts go on from the answers' own tokens: TTFT by turn, pages that were
    computed again and why, and whether the texts are equal
python -m bench.next_turn apart [--runs 5] [--num 60]
    prompts that share nothing, in turns: TTFT and throughput of each run

On two GPUs it is `bench.next_turn_gpus`.

Each run starts its processes anew (`baton up`, KV over NIXL). The client knows which pages have
been computed, from what it sent and got. So it checks that each page that was computed twice has a
counted reason. A token may differ where its margin to the second is small: the texts are compared
up to the first such token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from baton.client.clients import Client
from bench.up import Figures, Up
from console.loadgen.workload import Conversations, Planned, prompt_ids
from prefixes.keys import page_keys

PAGE = 16
SMALL_MARGIN = 0.02
"""Log probability by which a token leads. Float32 sums of other orders differ by less."""


@dataclass
class Turn:
    """One request as the client saw it."""

    prompt: list[int]
    answer: list[int]
    margins: list[float]
    ttft_s: float
    ended_s: float
    cached_tokens: int
    computed_twice: int
    """Pages that had been computed somewhere before it was sent, and were computed again."""


@dataclass
class Run:
    """One run of one policy."""

    policy: str
    conversations: list[list[Turn]]
    wall_s: float
    again: dict[str, float]
    busy: dict[str, float]
    """Share of the time in which a worker's steps ran."""
    figures: dict[str, float] = field(default_factory=dict)


class KnownPages:
    """Keys of all pages that were computed and told of, so far."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._lock = threading.Lock()

    def leading(self, tokens: Sequence[int]) -> int:
        """Leading pages of a prompt, all but its last token, that are known."""
        count = 0
        with self._lock:
            for key in self._of(tokens[:-1]):
                if key not in self._keys:
                    break
                count += 1
        return count

    def add(self, tokens: Sequence[int]) -> None:
        """The complete pages of these tokens are computed."""
        with self._lock:
            self._keys.update(self._of(tokens))

    @staticmethod
    def _of(tokens: Sequence[int]) -> list[bytes]:
        return page_keys(np.array(tokens, np.int32), PAGE)


def converse(
    client: Client, turns: Sequence[Planned], known: KnownPages, began_s: float, seed: int
) -> list[Turn]:
    """One conversation."""
    done: list[Turn] = []
    ids: list[int] = []
    time.sleep(max(0.0, began_s + turns[0].due_s - time.monotonic()))
    for planned in turns:
        assert planned.turn
        time.sleep(planned.turn.think_s)
        ids += prompt_ids(planned, seed, 4000).tolist()
        done.append(ask(client, ids, planned.output_tokens, known))
        ids += done[-1].answer
    return done


def ask(client: Client, ids: list[int], output_tokens: int, known: KnownPages) -> Turn:
    """One request."""
    before = known.leading(ids)
    sent_s, first_s = time.monotonic(), 0.0
    stream = client.stream(
        token_ids=list(ids), max_tokens=output_tokens, ignore_eos=True, temperature=0.0,
        logprobs=True, top_logprobs=2, omit_text=True, timeout_s=300,
    )  # fmt: skip
    for _ in stream:
        if not first_s:
            first_s = time.monotonic()
            known.add(ids)
    found, ended_s = stream.result, time.monotonic()
    answer = list(found.token_ids)
    known.add([*ids, *answer[:-1]])
    cached = found.usage.cached_prompt_tokens
    margins = [one.top[0][1] - one.top[1][1] for one in found.choices[0].logprobs]
    again = max(0, before - cached // PAGE)
    return Turn(list(ids), answer, margins, first_s - sent_s, ended_s, cached, again)


def run_conversations(policy: str, options: argparse.Namespace) -> Run:
    """All conversations under one policy."""
    plan = Conversations(
        options.conversations, options.turns, options.think, options.output_tokens,
        options.system_tokens, options.user_median, options.user_p90, options.context,
    ).plan(options.rate, options.seed)  # fmt: skip
    by: dict[int, list[Planned]] = {}
    for request in plan.requests:
        assert request.turn
        by.setdefault(request.turn.conversation, []).append(request)
    known = KnownPages()
    with Up(policy, options) as up, Client(up.address, timeout_s=300) as client:
        warm_up(client)
        before, began_s = up.figures(), time.monotonic()
        with ThreadPoolExecutor(len(by)) as pool:
            done = pool.map(
                lambda turns: converse(client, turns, known, began_s, options.seed), by.values()
            )
            conversations = list(done)
        wall_s = time.monotonic() - began_s
        time.sleep(0.5)
        after = up.figures()
    return Run(policy, conversations, wall_s, *counted(before, after, wall_s))


def warm_up(client: Client) -> None:
    """Every worker has computed and decoded, and knows its rates."""
    rng = np.random.default_rng()
    with ThreadPoolExecutor(8) as pool:
        prompts = [rng.integers(10, 4000, 600).tolist() for _ in range(24)]
        list(pool.map(lambda ids: client.generate(token_ids=ids, max_tokens=16), prompts))


def counted(
    before: Figures, after: Figures, wall_s: float
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """What grew: pages computed again by reason, busy share by process, and other counters."""
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    again = {
        labels: count for (_, name, labels), count in grown.items()
        if name == "baton_pages_computed_again_total" and count
    }  # fmt: skip
    busy = {
        process: seconds / wall_s for (process, name, _), seconds in grown.items()
        if name == "baton_engine_step_seconds_sum"
    }  # fmt: skip
    kept = (
        "baton_prefill_tokens_total", "baton_local_prefills_total", "baton_kv_fetches_total",
        "baton_routed_cached_tokens_total", "baton_kv_tier_loaded_tokens_total",
        "baton_preemptions_total", "baton_kv_tier_decisions_total", "baton_kv_tier_failures_total",
    )  # fmt: skip
    figures: dict[str, float] = {}
    for (_, name, labels), value in grown.items():
        if name in kept and value:
            figures[f"{name}{{{labels}}}"] = figures.get(f"{name}{{{labels}}}", 0.0) + value
    return again, busy, figures


def compare(one: Run, other: Run) -> tuple[int, int, list[str]]:
    """Equal tokens, conversations that left each other at a small margin, and real differences."""
    equal, small, wrong = 0, 0, []
    for number, pair in enumerate(zip(one.conversations, other.conversations, strict=True)):
        for index, (left, right) in enumerate(zip(*pair, strict=True)):
            at = _first_difference(left.answer, right.answer)
            if at is None:
                equal += len(left.answer)
                continue
            equal += at
            if min(left.margins[at], right.margins[at]) < SMALL_MARGIN:
                small += 1
            else:
                wrong.append(f"conversation {number}, turn {index + 1}, token {at}")
            break  # What follows has another prompt.
    return equal, small, wrong


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    differs = (i for i, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1])
    return next(differs, None)


def report(run: Run) -> dict[str, Any]:
    """Prints a run; returns its figures."""
    turns = list(zip(*run.conversations, strict=True))
    p50 = [1e3 * statistics.median(turn.ttft_s for turn in column) for column in turns]
    later = [turn.ttft_s for column in turns[1:] for turn in column]
    p90 = 1e3 * float(np.percentile(later, 90)) if later else 0.0
    hits = [sum(turn.cached_tokens for turn in column) for column in turns]
    cached = [n / sum(len(turn.prompt) for turn in c) for n, c in zip(hits, turns, strict=True)]
    twice = sum(turn.computed_twice for one in run.conversations for turn in one)
    found = {
        "policy": run.policy,
        "wall_s": round(run.wall_s, 1),
        "busy": {name: round(share, 3) for name, share in run.busy.items()},
        "ttft_p50_ms_by_turn": [round(value, 1) for value in p50],
        "cached_share_by_turn": [round(value, 3) for value in cached],
        "ttft_p50_ms_from_turn_2": round(1e3 * statistics.median(later), 1) if later else None,
        "ttft_p90_ms_from_turn_2": round(p90, 1) if later else None,
        "pages_computed_twice": twice,
        "counted": run.again,
        "without_reason": max(0, twice - round(sum(run.again.values()))),
        **run.figures,
    }
    print(json.dumps(found), flush=True)
    return found


def conversations(options: argparse.Namespace) -> bool:
    """Runs every policy and compares them. Returns whether all is as it should be."""
    runs = [run_conversations(policy, options) for policy in options.policies]
    found = [report(run) for run in runs]
    good = all(one["policy"] != "cost" or not one["without_reason"] for one in found)
    for one, other in itertools.pairwise(runs):
        equal, small, wrong = compare(one, other)
        print(f"{one.policy} and {other.policy}: {equal} tokens equal; {small} conversations go")
        print(f"apart at a margin below {SMALL_MARGIN}, {len(wrong)} elsewhere {wrong[:5]}")
        good &= not wrong
        ttft = [run["ttft_p50_ms_from_turn_2"] for run in (found[0], found[-1])]
    if len(runs) > 1 and all(ttft):
        print(f"TTFT p50 from turn 2 on: {ttft[1] / ttft[0]:.2f} x {options.policies[0]}'s")
    return good


def apart(options: argparse.Namespace) -> bool:
    """Prompts that share nothing: runs of the policies in turns."""
    for number in range(options.runs):
        for policy in options.policies:
            rng = np.random.default_rng(options.seed + number)
            gaps_s = rng.exponential(1 / options.rate, options.num).cumsum().tolist()
            prompts = [rng.integers(10, 4000, options.prompt_tokens).tolist() for _ in gaps_s]
            with Up(policy, options) as up, Client(up.address, timeout_s=300) as client:
                warm_up(client)
                began_s = time.monotonic()
                with ThreadPoolExecutor(options.num) as pool:
                    turns = list(pool.map(
                        lambda due: _at(client, began_s + due[0], due[1], options),  # noqa: B023
                        zip(gaps_s, prompts, strict=True),
                    ))  # fmt: skip
                wall_s = time.monotonic() - began_s
            ttft_ms = [1e3 * turn.ttft_s for turn in turns]
            p50, p90 = np.percentile(ttft_ms, (50, 90)).tolist()
            rate = options.num * options.output_tokens / wall_s
            words = f"TTFT p50 {p50:.0f} p90 {p90:.0f} ms, {rate:.1f} tokens/s"
            print(f"run {number} {policy:10} {words}", flush=True)
    return True


def _at(client: Client, due_s: float, ids: list[int], options: argparse.Namespace) -> Turn:
    time.sleep(max(0.0, due_s - time.monotonic()))
    return ask(client, ids, options.output_tokens, KnownPages())


def _parsers() -> Iterator[argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    yield parser
    for name in ("conversations", "apart"):
        mode = modes.add_parser(name)
        mode.add_argument("--policies", nargs="+", default=["least_work", "cost"])
        mode.add_argument("--model", default="bench/shapes/tiny")
        mode.add_argument("--device", default="cpu")
        mode.add_argument("--kv-gib", type=float, default=1.0)
        mode.add_argument("--host-gib", type=float, default=0.0, help="of `cost`")
        mode.add_argument("--max-sequences", type=int, default=32)
        mode.add_argument("--rate", type=float, default=1.0, help="begun in a second")
        mode.add_argument("--output-tokens", type=int, default=24)
        mode.add_argument("--seed", type=int, default=1)
        yield mode


def main() -> None:
    """Runs one mode."""
    parser, talk, alone = _parsers()
    talk.add_argument("--conversations", type=int, default=200)
    talk.add_argument("--turns", type=int, default=4)
    talk.add_argument("--think", type=float, default=1.0)
    talk.add_argument("--system-tokens", type=int, default=512)
    talk.add_argument("--user-median", type=float, default=37)
    talk.add_argument("--user-p90", type=float, default=4900)
    talk.add_argument("--context", type=int, default=4096)
    alone.add_argument("--runs", type=int, default=5)
    alone.add_argument("--num", type=int, default=60)
    alone.add_argument("--prompt-tokens", type=int, default=1024)
    options = parser.parse_args()
    mode = {"conversations": conversations, "apart": apart}[options.mode]
    raise SystemExit(not mode(options))


if __name__ == "__main__":
    main()
