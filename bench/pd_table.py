"""What `bench/pd.sh` measured, as tables: latencies of each run, then the hand-off.

python -m bench.pd_table ROWS.jsonl ...            prints the tables of one or more files
python -m bench.pd_table --router-cpu HOST:PORT    prints the CPU seconds of the router so far
python -m bench.pd_table --router-cpu HOST:PORT --before SECONDS --add ROW.json ROWS.jsonl
                                                   appends a result of `baton bench --json`, with
                                                   the cluster that it was measured on

`xPyD` counts workers (B: `--role both`). Times in ms. `kept`: share of the requests that kept the
service levels. `queue`: TTFT of one server with one queue on the same arrivals, simulated.
`router`: its CPU time over that of the runs, of one core; warm-ups count, so it is a little too
high, and near 100 % the router is what was measured. The hand-off is of the last 48 requests of a
row, median and largest: `exposed` from the end of the last chunk's compute to the last push seen
done, `wire` from the first push to the end of the last.
"""

from __future__ import annotations

import argparse
import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHOWN = ("BATON_PAGE_SIZE_TOKENS", "BATON_TRANSPORT", "BATON_LOCAL_PREFILL", "UCX_TLS")
"""Variables that a row is told apart by, beside every other BATON_* that is set."""
USUAL = {"BATON_LOAD_FORMAT": "dummy", "BATON_MAX_SEQUENCES": "128"}
LATENCIES = (
    ("TTFT", "ttft_ms"), ("queue", "simulated_ttft_ms"), ("2nd gap", "second_gap_ms"),
    ("ITL", "itl_ms"), ("TPOT", "tpot_ms"),
)  # fmt: skip
HANDOFF = (
    ("exposed", "kv.send", "baton.kv.exposed_ms"),
    ("posting", "kv.send", "baton.kv.posting_ms"),
    ("wire", "kv.send", "baton.kv.wire_ms"),
    ("GB/s", "kv.send", "baton.kv.gigabytes_per_s"),
    ("pushes", "kv.send", "baton.kv.pushes"),
    ("descriptors", "kv.send", "baton.kv.descriptors"),
    ("join wait", "decode.generate", "baton.decode.join_wait_ms"),
)


def cluster() -> dict[str, Any]:
    """What is running, from the environment that `pd.sh` was started in."""
    counts = {name: int(os.environ.get(name.upper(), 0)) for name in ("prefill", "decode", "both")}
    set_here = {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith("BATON_") or name in SHOWN) and USUAL.get(name) != value
    }
    return {**counts, "settings": set_here}


def router_cpu_s(admin: str) -> float:
    """CPU time of the router's process since it started."""
    with urllib.request.urlopen(f"http://{admin}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("process_cpu_sec")).split()[1])


def add(row: Path, rows: Path, cpu_s: float) -> None:
    """Appends one result, for which the router took so long."""
    found = {**json.loads(row.read_text()), "cluster": cluster(), "router_cpu_s": round(cpu_s, 2)}
    with rows.open("a") as file:
        file.write(json.dumps(found) + "\n")


def named(row: dict[str, Any]) -> str:
    """The cluster and the load of a row."""
    counts, load = row["cluster"], row["workload"]
    workers = "".join(
        f"{counts[name]}{letter}"
        for name, letter in (("prefill", "P"), ("decode", "D"), ("both", "B"))
        if counts[name]
    )
    lengths = f"{load['prompt_tokens']}+{load['output_tokens']}"
    lengths = lengths if load["prompt_tokens"] else "azure"
    rate = f"@{load['rate']:g}" if load["rate"] else "idle"
    settings = (f"{k.removeprefix('BATON_')}={v}" for k, v in counts["settings"].items())
    return " ".join([workers, lengths, rate, *settings])


def latencies(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line a run, p50 / p99."""
    yield ["", *(title for title, _ in LATENCIES), "whole", "kept", "tok/s", "router", "client"]
    for row in rows:
        busy = row["router_cpu_s"] / sum(run["wall_s"] for run in row["runs"])
        for run in row["runs"]:
            cells = [_pair(run[key], "p50", "p99") for _, key in LATENCIES]
            kept = run["attainment"]
            yield [
                named(row), *cells, f"{run['ok']}/{run['requests']}",
                "" if kept is None else f"{kept:.1%}", f"{run['output_token_rate']:.0f}",
                f"{busy:.0%}",
                "late" if run["client"]["complaints"] else "in time",
            ]  # fmt: skip


def handoffs(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line a row, median (largest)."""
    yield ["", *(title for title, _, _ in HANDOFF), "path"]
    for row in rows:
        spans = row["spans"]["median_and_max"]
        if "kv.send" in spans:
            found = [spans.get(span, {}).get(key) for _, span, key in HANDOFF]
            cells = [f"{pair[0]:.2f} ({pair[1]:.2f})" if pair else "" for pair in found]
            yield [named(row), *cells, ", ".join(row["spans"]["transports"])]


def _pair(found: dict[str, float] | None, one: str, other: str) -> str:
    return f"{found[one]:.2f} / {found[other]:.2f}" if found else ""


def table(lines: list[list[str]]) -> str:
    """Columns as wide as they need to be."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main() -> None:
    """Adds, or prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--router-cpu", metavar="HOST:PORT")
    parser.add_argument("--before", type=float, default=0.0)
    parser.add_argument("--add", type=Path)
    arguments = parser.parse_args()
    if arguments.router_cpu:
        cpu_s = router_cpu_s(arguments.router_cpu) - arguments.before
        if arguments.add:
            add(arguments.add, arguments.files[0], cpu_s)
        else:
            print(cpu_s)
        return
    rows = [json.loads(line) for file in arguments.files for line in file.open()]
    print(table(list(latencies(rows))))
    print()
    print(table(list(handoffs(rows))))


if __name__ == "__main__":
    main()
