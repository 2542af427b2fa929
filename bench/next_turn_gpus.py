"""The next turn of a conversation on two GPUs: P and D, beside two replicas.

python -m bench.next_turn_gpus [--runs 2] [--limit-s 560] [--json FILE]
    64 conversations of 8 turns up to 8,192 tokens, in turns on

        pair    one P and one D, each with --host-gib of host memory
        both    two workers that do both legs, with as much

python -m bench.next_turn_gpus --apart 200 [--conversations 0]
    after each of these runs, with the same processes, prompts that share nothing: so many at
    --apart-rate a second, then as many at once. With --conversations 0 nothing else runs

All arrangements of a run get the same requests; each run has a seed of its own. Processes start
anew where the arrangement changes. So every second run begins with the one that ended the run
before. No run begins that would, by the longest so far, last beyond --limit-s seconds. One that
fails is printed, and the others go on.

`busy` is the time of P's steps, by that of the run. `fetch` and `hand-off` are the bytes of all
transfers of 32 MiB and more by their time: a fetch's from the wish for the pages to their arrival,
a hand-off's from its first push to the end of the last. Those of one push are counted alone, since
others wait for the compute between their pushes. `fetch_from_pool` and `fetch_from_host` have the
parts of a fetch (`bench.turn_traces`), by where the holder had the pages.

`gap_second_ms` and `gap_later_ms` are each stream's longest gaps by its worker's clock: before the
second token, which a hand-off lengthens, and after it. `longest_gaps` has the five longest with all
that overlaps them, `said_by_workers` what the step loops say of long gaps.

To try it on a CPU: --device cpu --model bench/shapes/tiny --kv-gib 0.05 --host-gib 0.2
--conversations 8 --turns 3 --context 2048 --vocabulary 4000 --apart 20 --apart-rate 2
--least-mib 0.1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from baton.client.clients import Client
from bench import turn_traces
from bench.harness import Up, counted, table, warm_up, write_json

ARRANGEMENTS = {"pair": (1, 1, 0), "both": (0, 0, 2)}
"""Workers with the roles prefill, decode and both."""
WAITED = "streams waited"
"""A worker's word of a long gap (`engine.loop.slow_steps`)."""
Found = dict[str, Any]


class Processes:
    """Servers of the arrangement that runs now; a context manager."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._open = contextlib.ExitStack()
        self.name = ""
        self.start_s = 0.0
        """The longest start so far."""

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def of(self, name: str) -> Up:
        """Servers of an arrangement, warm. Others are stopped first."""
        if self.name != name:
            self.stop()
            prefill, decode, both = (self._options.times * one for one in ARRANGEMENTS[name])
            began_s = time.monotonic()
            self._up = self._open.enter_context(Up(self._options, (prefill, decode, both)))
            with Client(self._up.address, timeout_s=120) as client:
                warm_up(client)
            took_s = time.monotonic() - began_s
            self.start_s = max(self.start_s, took_s)
            print(f"{name}: ready and warm after {took_s:.0f} s", flush=True)
            self.name = name
        return self._up

    def stop(self) -> None:
        """Stops what runs."""
        self.name = ""
        self._open.close()


class Bench:
    """Every run, within the time that there is."""

    def __init__(self, options: argparse.Namespace, processes: Processes) -> None:
        self._options = options
        self._processes = processes
        self._end_s = time.monotonic() + options.limit_s
        self._longest_s = 0.0
        """Without a start."""
        self.found: list[Found] = []

    def run_all(self) -> None:
        """In turns."""
        for number, name in in_turns(self._options.arrangements, self._options.runs):
            start_s = 0.0 if self._processes.name == name else self._processes.start_s
            if time.monotonic() + start_s + self._longest_s > self._end_s:
                print(f"no time for run {number} of {name}", flush=True)
                continue
            try:
                self._one(number, name)
            except Exception:
                traceback.print_exc(limit=3)
                print(f"run {number} of {name} failed", flush=True)
                self._processes.stop()

    def _one(self, number: int, name: str) -> None:
        up = self._processes.of(name)
        began_s, seed = time.monotonic(), self._options.seed + number
        found: Found = {"run": number, "arrangement": name}
        self.found.append(found)
        if self._options.conversations:
            self._keep(found, self._conversations(up, seed))
        if self._options.apart:
            self._keep(found, {"apart": self._apart(up, seed + 1000)})
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)

    def _keep(self, found: Found, more: Found) -> None:
        found |= more
        print(found["run"], found["arrangement"], json.dumps(more), flush=True)
        write_json(self._options.json, self.found)

    def _conversations(self, up: Up, seed: int) -> Found:
        """All begin in the time from one turn to the next, about."""
        options = self._options
        argv = ["--conversations", options.conversations, "--turns", options.turns]
        argv += ["--think", options.think, "--context", options.context]
        argv += ["--rate", options.conversations / max(1.0, options.think + 1.0)]
        argv += ["--output-tokens", options.output_tokens]
        before, began_ns = up.figures(), time.time_ns()
        found = self._baton_bench(up, seed, argv)
        run = found["runs"][0]
        found_traces = turn_traces.read(up.admin, began_ns)
        again, busy, figures = counted(before, up.figures(), run["wall_s"])
        later = found["ttft_ms_from_turn_2"][0]
        return {
            "think_s": round(options.think, 2),
            "seed": seed,
            **latencies(found),
            "ttft_ms_from_turn_2": later and {key: later[key] for key in ("p50", "p90", "p99")},
            "turn_mean_ms": run["e2e_ms"]["mean"],
            "ttft_p50_ms_by_turn": [turn["ttft_ms"]["p50"] for turn in found["turns"][0]],
            "sources_by_turn": [turn["sources"] for turn in found["turns"][0]],
            "busy": {name: round(share, 3) for name, share in busy.items()},
            "computed_again": again,
            **turn_traces.moved(found_traces, options.least_mib),
            **turn_traces.gaps(found_traces),
            "said_by_workers": up.logged(WAITED, began_ns),
            **figures,
        }

    def _apart(self, up: Up, seed: int) -> Found:
        """Prompts that share nothing: the first token where there is time, the rate where not."""
        options = self._options
        argv = ["--num", options.apart, "--prompt-tokens", 1024, "--output-tokens", 64]
        calm = self._baton_bench(up, seed, [*argv, "--rate", options.apart_rate])
        crowd = self._baton_bench(up, seed + 500, [*argv, "--rate", 1000])
        return {"calm": latencies(calm), "crowd": latencies(crowd)}

    def _baton_bench(self, up: Up, seed: int, argv: Sequence[object]) -> Found:
        words = [sys.executable, "-m", "baton", "bench", "--url", up.address, "--json"]
        words += ["--vocabulary", str(self._options.vocabulary), "--seed", str(seed)]
        words += ["--warm-ups", "1"]
        left_s = max(30.0, self._end_s - time.monotonic())
        done = subprocess.run(
            [*words, *map(str, argv)],
            capture_output=True, text=True, check=False, timeout=left_s,
        )  # fmt: skip
        if not done.stdout:
            raise RuntimeError(done.stderr[-3000:])
        found: Found = json.loads(done.stdout)
        if not found["valid"]:
            print(f"not valid: {found['complaints']}", flush=True)
        return found


def in_turns(names: Sequence[str], runs: int) -> Iterator[tuple[int, str]]:
    """Every second run begins with the arrangement that the run before ended with."""
    for number in range(runs):
        yield from ((number, name) for name in (names[::-1] if number % 2 else names))


def latencies(found: Found) -> Found:
    """Reads a result of `baton bench`."""
    run = found["runs"][0]
    return {
        "valid": found["valid"],
        "ok": f"{run['ok']}/{run['requests']}",
        "wall_s": round(run["wall_s"], 1),
        "output_tokens_per_s": round(run["output_token_rate"], 1),
        "ttft_ms": {key: run["ttft_ms"][key] for key in ("mean", "p50", "p90", "p99")},
        "itl_ms": {key: run["itl_ms"][key] for key in ("p50", "p99", "max")},
    }


def show(found: Sequence[Found]) -> None:
    """A table of the conversations, one of the prompts that share nothing, and the ratios."""
    talk = [one for one in found if "think_s" in one]
    lines = [["run", "", "think", "P busy", "TTFT p50", "from turn 2", "p90", "ITL p50", "p99",
              "longest", "tok/s", "fetch GB/s", "hand-off", "on D", "ok"]]  # fmt: skip
    for one in talk:
        later = one["ttft_ms_from_turn_2"] or {"p50": 0.0, "p90": 0.0}
        speeds = [
            f"{each['gb_per_s']} ({each['count']})" if each["count"] else ""
            for each in (one["fetch"], one["hand_off"])
        ]
        numbers = [one["ttft_ms"]["p50"], later["p50"], later["p90"], *one["itl_ms"].values()]
        lines.append([
            str(one["run"]), one["arrangement"], f"{one['think_s']}",
            f"{one['busy'].get('prefill-0', 0):.0%}", *(f"{each:.1f}" for each in numbers),
            f"{one['output_tokens_per_s']:.0f}", *speeds, f"{one['on_decode']}", one["ok"],
        ])  # fmt: skip
    if talk:
        print(table(lines))
        _ratio("TTFT p50 from turn 2 on", talk, lambda one: one["ttft_ms_from_turn_2"]["p50"])
        _ratio("ITL p99", talk, lambda one: one["itl_ms"]["p99"])
    alone = [one for one in found if "apart" in one]
    if not alone:
        return
    lines = [["run", "nothing shared", "TTFT mean", "p50", "p90", "p99", "crowd: tok/s", "ok"]]
    for one in alone:
        calm, crowd = one["apart"]["calm"], one["apart"]["crowd"]
        cells = [f"{each:.2f}" for each in calm["ttft_ms"].values()]
        rate = f"{crowd['output_tokens_per_s']:.0f}"
        ok = f"{calm['ok']} {crowd['ok']}"
        lines.append([str(one["run"]), one["arrangement"], *cells, rate, ok])
    print("\n" + table(lines))
    _ratio("TTFT p50", alone, lambda one: one["apart"]["calm"]["ttft_ms"]["p50"])
    _ratio("tokens/s of a crowd", alone, lambda one: one["apart"]["crowd"]["output_tokens_per_s"])


def _ratio(what: str, found: Sequence[Found], figure: Any) -> None:
    """The median of a pair's runs, as a multiple of that of the replicas."""
    of = {
        name: [figure(one) for one in found if one["arrangement"] == name] for name in ARRANGEMENTS
    }
    if all(of.values()):
        pair, both = (statistics.median(of[name]) for name in ("pair", "both"))
        print(f"{what}: pair {pair:.1f}, {pair / both:.3f} x the replicas' {both:.1f}")


def main() -> None:
    """Runs, and prints the tables last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arrangements", nargs="+", default=list(ARRANGEMENTS))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=560.0)
    parser.add_argument("--think", type=float, default=2.0, help="mean seconds")
    parser.add_argument("--conversations", type=int, default=64, help="0: none")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--apart", type=int, default=0, help="prompts that share nothing")
    parser.add_argument("--apart-rate", type=float, default=12.0)
    parser.add_argument(
        "--times", type=int, default=1, help="2: twice as many workers of each role"
    )
    parser.add_argument("--model", default="bench/shapes/llama-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--kv-gib", type=float, default=20.0)
    parser.add_argument("--host-gib", type=float, default=64.0)
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=49_000)
    parser.add_argument("--least-mib", type=float, default=32.0, help="of a transfer that counts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    wrong = set(options.arrangements) - set(ARRANGEMENTS)
    if wrong:
        parser.error(f"no such arrangement: {', '.join(wrong)}")
    with Processes(options) as processes:
        bench = Bench(options, processes)
        bench.run_all()
    show(bench.found)


if __name__ == "__main__":
    main()
