"""What `bench/pd.sh` measured, as tables: latencies of each run, then the hand-off.

python -m bench.pd_table ROWS.jsonl ...               prints the tables of one or more files
python -m bench.pd_table --medians ROWS.jsonl ...     prints medians of each load, file by file
python -m bench.pd_table --admin NAME=HOST:PORT ...   prints what these processes have counted so
                                                      far; routers are called `router-...`
python -m bench.pd_table --admin NAME=HOST:PORT ... --before COUNTED --add ROW.json ROWS.jsonl
                                                      appends a result of `baton bench --json`,
                                                      and the cluster that it was measured on

`xPyD` counts workers (B: `--role both`), xR routers if there is more than one. Times in ms. `kept`:
share of the requests that kept the service levels. `queue`: TTFT of one server with one queue on
the same arrivals, simulated. `longest`: the longest time between two tokens. `router`: the CPU time
of the busiest one over that of the runs, of one core; warm-ups count, so it is a little too high,
and near 100 % the router is what was measured. `late`: which event loops woke up more than 25 ms
late, and how often of ten times a second. The hand-off is of the last 48 requests of a row, median
and largest: `GB` sent, `exposed` from the end of the last chunk's compute to the last push seen
done, `wire` from the first push to the end of the last. The last table says where uneven gaps come
from, by process (p50 / p99, interpolated in the metrics' buckets): `step` from launch to settled,
`lag` of the event loop, `gap` between two messages of tokens to a client.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import table

Counted = dict[str, dict[str, float]]
CPU = "process_cpu_seconds_total"
LAG = "baton_event_loop_lag_seconds"
LATE = "0.025"
HISTOGRAMS = {
    "step": "baton_engine_step_seconds", "lag": LAG, "gap": "baton_inter_token_seconds",
}  # fmt: skip
"""Histograms that are kept, bucket by bucket."""
COUNTED = {"routers": "R", "prefill": "P", "decode": "D", "both": "B"}
"""Variables that count processes, and the letter of each."""
SHOWN = ("DOOR", "MODEL", "TRY", "UCX_TLS", "UP_ARGS")
"""Variables that distinguish a row, beside every BATON_* that is set."""
USUAL = {"BATON_DEBUG_LOAD_FORMAT": "dummy", "BATON_MAX_SEQUENCES": "128"}
LATENCIES = (
    ("TTFT", "ttft_ms"), ("queue", "simulated_ttft_ms"), ("2nd gap", "second_gap_ms"),
    ("ITL", "itl_ms"), ("TPOT", "tpot_ms"),
)  # fmt: skip
HANDOFF = (
    ("GB", "kv.send", "baton.kv.bytes"),
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
    counts = {name: int(os.environ.get(name.upper(), 0)) for name in COUNTED}
    set_here = {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith("BATON_") or name in SHOWN) and USUAL.get(name) != value
    }
    return {**counts, "settings": set_here, "lengths": os.environ.get("LENGTHS", "azure")}


def counted(admins: Sequence[str]) -> Counted:
    """By process that lives, since it started: its CPU time, and how often its event loop woke up
    late."""
    found = {}
    for admin in admins:
        name, _, address = admin.partition("=")
        try:
            page = metrics(address)
        except OSError:
            continue
        in_time = page[f'{LAG}_bucket{{le="{LATE}"}}']
        found[name] = {
            "cpu_s": page[CPU], "late": page[f"{LAG}_count"] - in_time, **_buckets(page)
        }  # fmt: skip
    return found


def _buckets(page: Mapping[str, float]) -> dict[str, float]:
    """How much was at most so many seconds, as `step<=0.005`, of all labels together."""
    found: dict[str, float] = {}
    for short, metric in HISTOGRAMS.items():
        for name, value in page.items():
            if name.startswith(f"{metric}_bucket{{"):
                bound = name.partition('le="')[2].partition('"')[0]
                key = f"{short}<={bound}"
                found[key] = found.get(key, 0.0) + value
    return found


def metrics(address: str) -> dict[str, float]:
    """What an admin port shows, by name and labels as they are written."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


def add(row: Path, rows: Path, before: Counted | None, now: Counted) -> None:
    """Appends one result, and what was counted meanwhile; since the start without `before`, and of
    a process that has started anew."""
    grown = {}
    for name, process in now.items():
        had = (before or {}).get(name, {})
        had = had if had.get("cpu_s", 0.0) <= process["cpu_s"] else {}
        grown[name] = {key: round(value - had.get(key, 0), 2) for key, value in process.items()}
    found = {
        **json.loads(row.read_text()),
        "cluster": cluster(),
        "processes": grown,
        "levels": levels(row.with_name("requests.jsonl")),
    }
    with rows.open("a") as file:
        file.write(json.dumps(found) + "\n")


def levels(requests: Path) -> dict[str, list[float]]:
    """By each of `LEVELS` (TTFT:ITL-P99 in ms, separated by commas): the share of the requests that
    kept both limits, and how many did a second, from the first one sent to the last one ended."""
    if not (lines := [json.loads(line) for line in requests.open()]):
        return {}
    ends_s = [one["sent_s"] + one["e2e_ms"] / 1e3 for one in lines if "e2e_ms" in one]
    wall_s = max(ends_s, default=0.0) - min(one["sent_s"] for one in lines)
    found = {}
    for level in filter(None, os.environ.get("LEVELS", "").split(",")):
        ttft_ms, itl_ms = map(float, level.split(":"))
        kept = sum(
            "e2e_ms" in one and one["ttft_ms"] <= ttft_ms and one["itl_p99_ms"] <= itl_ms
            for one in lines
        )
        found[level] = [kept / len(lines), kept / wall_s if ends_s else 0.0]
    return found


def named(row: dict[str, Any]) -> str:
    """The cluster and the load of a row."""
    counts, load = row["cluster"], row["workload"]
    processes = "".join(
        f"{counts[name]}{letter}"
        for name, letter in COUNTED.items()
        if counts.get(name, 0) > (name == "routers")
    )
    lengths = f"{load['prompt_tokens']}+{load['output_tokens']}"
    lengths = lengths if load["prompt_tokens"] else counts.get("lengths", "azure")
    rate = f"@{load['rate']:g}" if load["rate"] else "idle"
    settings = (
        f"{name.removeprefix('BATON_')}={value.removeprefix('bench/shapes/')}"
        for name, value in counts["settings"].items()
    )
    return " ".join([processes, lengths, rate, *settings])


def latencies(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line a run, p50 / p99."""
    yield ["", *(title for title, _ in LATENCIES), "longest", "whole", "kept", "tok/s", "router",
           "late", "client"]  # fmt: skip
    for row in rows:
        processes = row["processes"]
        wall_s = sum(run["wall_s"] for run in row["runs"])
        spent = (p["cpu_s"] for name, p in processes.items() if "router" in name)
        busy = max(spent, default=0.0) / wall_s
        late = ", ".join(f"{name} {p['late']:.0f}" for name, p in processes.items() if p["late"])
        for run in row["runs"]:
            cells = [_pair(run[key], "p50", "p99") for _, key in LATENCIES]
            kept = run["attainment"]
            yield [
                named(row), *cells, _longest(run), f"{run['ok']}/{run['requests']}",
                "" if kept is None else f"{kept:.1%}", f"{run['output_token_rate']:.0f}",
                f"{busy:.0%}", late,
                "late" if run["client"]["complaints"] else "in time",
            ]  # fmt: skip


def ticks(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line for each row and process: how even its steps, event loop and streams are, ms."""
    yield ["", "process", "CPU", *HISTOGRAMS]
    for row in rows:
        wall_s = sum(run["wall_s"] for run in row["runs"])
        for name, process in sorted(row["processes"].items()):
            cells = [_within(process, short) for short in HISTOGRAMS]
            if any(cells):
                yield [named(row), name, f"{process['cpu_s'] / wall_s:.0%}", *cells]


def _within(process: Mapping[str, float], short: str) -> str:
    """p50 / p99 of a histogram, ms; empty: it has nothing."""
    bounds = [
        (float(key.partition("<=")[2]), n)
        for key, n in process.items()
        if key.startswith(f"{short}<=")
    ]
    at_most = sorted(bounds)
    if not at_most or not at_most[-1][1]:
        return ""
    cells = []
    for share in (0.5, 0.99):
        wanted, low, before = share * at_most[-1][1], 0.0, 0.0
        for bound, count in at_most:
            if count >= wanted:
                part = (wanted - before) / (count - before)
                cells.append(low if bound == float("inf") else low + part * (bound - low))
                break
            low, before = bound, count
    return " / ".join(f"{1e3 * cell:.1f}" for cell in cells)


def handoffs(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line a row, median (largest)."""
    yield ["", *(title for title, _, _ in HANDOFF), "path"]
    for row in rows:
        spans = row["spans"]["median_and_max"]
        if "kv.send" in spans:
            found = [spans.get(span, {}).get(key) for _, span, key in HANDOFF]
            scales = [1e-9 if title == "GB" else 1.0 for title, _, _ in HANDOFF]
            cells = [
                f"{scale * pair[0]:.2f} ({scale * pair[1]:.2f})" if pair else ""
                for pair, scale in zip(found, scales, strict=True)
            ]
            yield [named(row), *cells, ", ".join(row["spans"]["transports"])]


def by_level(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line a row: the share of the requests that kept each of `LEVELS`, and how many a second."""
    rows = [row for row in rows if row.get("levels")]
    names = list(dict.fromkeys(level for row in rows for level in row["levels"]))
    yield ["", *names]
    for row in rows:
        found = [row["levels"].get(name) for name in names]
        yield [named(row), *("{:.1%}, {:.1f}/s".format(*one) if one else "" for one in found)]


def medians(files: Mapping[str, list[dict[str, Any]]]) -> Iterator[list[str]]:
    """A line for each load and file: medians of the runs' p50 and p99, with the range of the p99
    where there are several runs."""
    yield ["", "", "runs", *(title for title, _ in LATENCIES), "longest", "kept", "exposed"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for name, rows in files.items():
        for row in rows:
            groups.setdefault((named(row), name), []).append(row)
    for (load, name), rows in sorted(groups.items()):
        runs = [run for row in rows for run in row["runs"]]
        cells = [_median_pair([run[key] for run in runs]) for _, key in LATENCIES]
        kept = [run for run in runs if run["attainment"] is not None]
        shares = [[run[key] for run in kept] for key in ("attainment", "good_rate")]
        spans = [row["spans"]["median_and_max"].get("kv.send", {}) for row in rows]
        exposed = [span["baton.kv.exposed_ms"][0] for span in spans if span]
        yield [
            load, name, str(len(runs)), *cells, "; ".join(map(_longest, runs)),
            "{:.1%}, {:.2f}/s".format(*map(statistics.median, shares)) if kept else "",
            f"{statistics.median(exposed):.2f}" if exposed else "",
        ]  # fmt: skip


def _median_pair(found: Sequence[dict[str, float] | None]) -> str:
    known = [one for one in found if one]
    if not known:
        return ""
    p50, p99 = ([one[key] for one in known] for key in ("p50", "p99"))
    spread = f" ({min(p99):.2f}-{max(p99):.2f})" if len(known) > 1 else ""
    return f"{statistics.median(p50):.2f} / {statistics.median(p99):.2f}{spread}"


def _longest(run: dict[str, Any]) -> str:
    return f"{run['itl_ms']['max']:.1f}" if run["itl_ms"] else ""


def _pair(found: dict[str, float] | None, one: str, other: str) -> str:
    return f"{found[one]:.2f} / {found[other]:.2f}" if found else ""


def main() -> None:
    """Adds, or prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--medians", action="store_true")
    parser.add_argument("--admin", metavar="NAME=HOST:PORT", nargs="+")
    parser.add_argument("--before", type=json.loads)
    parser.add_argument("--add", type=Path, nargs=2, metavar=("ROW", "ROWS"))
    arguments = parser.parse_args()
    if arguments.admin:
        now = counted(arguments.admin)
        if arguments.add:
            row, rows_file = arguments.add
            add(row, rows_file, arguments.before, now)
        else:
            print(json.dumps(now))
        return
    files = {
        file.parent.name if file.stem == "rows" else file.stem: list(map(json.loads, file.open()))
        for file in arguments.files
    }
    if arguments.medians:
        print(table(list(medians(files))))
        return
    rows = [row for rows in files.values() for row in rows]
    print(table(list(latencies(rows))))
    print()
    print(table(list(handoffs(rows))))
    if any(row.get("levels") for row in rows):
        print()
        print(table(list(by_level(rows))))
    if len(lines := list(ticks(rows))) > 1:
        print()
        print(table(lines))


if __name__ == "__main__":
    main()
