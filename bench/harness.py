"""What benchmarks share: servers in processes of their own with their counters, tables, JSON.

A file of `--json` has where its figures come from: the command, the commit and the device; then
`found`, which is the benchmark's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from baton.client.clients import Client

READY_S = {"cpu": 120.0, "cuda": 240.0}
"""The processes are ready within so many seconds, by device. Pinning host memory takes time."""
Figures = dict[tuple[str, str, str], float]
"""Counters by process, name and labels."""


class Up:
    """`baton up` as a child process; a context manager. Each worker has `options.host_gib` of host
    memory below its pool."""

    def __init__(self, options: argparse.Namespace, counts: tuple[int, int, int]) -> None:
        self._options = options
        self._counts = counts
        """Workers with the roles prefill, decode and both."""
        self._port, self._admin = _free_port(), _free_port()
        self._log = Path(tempfile.mkdtemp(prefix="baton-up-")) / "up.log"
        self._environment = {
            **os.environ,
            "BATON_DEBUG_LOAD_FORMAT": "dummy",
            "BATON_DEBUG_MAX_STORED_TRACES": "4096",
            "BATON_KV_HOST_GIB": str(options.host_gib),
            "BATON_MAX_SEQUENCES": str(options.max_sequences),
            "GRPC_VERBOSITY": "error",
        }
        if options.device == "cpu":
            self._environment["OMP_NUM_THREADS"] = "1"

    def __enter__(self) -> Up:
        argv = [sys.executable, "-m", "baton", "up", "--model", self._options.model]
        argv += ["--device", self._options.device]
        for role, count in zip(("prefill", "decode", "both"), self._counts, strict=True):
            argv += [f"--{role}", str(count)]
        argv += ["--kv-memory-gib", str(self._options.kv_gib), "--drain-s", "2"]
        argv += ["--port", str(self._port), "--http-port", "0", "--admin-port", str(self._admin)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                argv, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )
        give_up_s = time.monotonic() + READY_S[self._options.device]
        while "Baton is ready" not in self._log.read_text():
            if self._process.poll() is not None or time.monotonic() > give_up_s:
                self.__exit__()
                raise RuntimeError(f"not ready:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.2)
        self.admins = self._admins()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._process.kill()
        self._process.wait()

    @property
    def admin(self) -> str:
        """The router's admin address."""
        return f"127.0.0.1:{self._admin}"

    @property
    def address(self) -> str:
        """Where clients are served."""
        return f"127.0.0.1:{self._port}"

    def _admins(self) -> dict[str, str]:
        found = {"router": f"127.0.0.1:{self._admin}"}
        for line in self._log.read_text().splitlines():
            if "worker serves" in line and "admin=" in line:
                address = line.split("admin=")[1].split()[0]
                found[line.split()[0]] = address
        return found

    def logged(self, what: str, since_ns: int) -> list[str]:
        """The lines of the processes' log since then that contain a text, at most 20."""
        since = time.strftime("%H:%M:%S", time.localtime(since_ns / 1e9))
        lines = [line for line in self._log.read_text().splitlines() if what in line]
        return [line for line in lines if line.partition("│")[2].strip() >= since][:20]

    def figures(self) -> Figures:
        """The counters of all processes."""
        found = {}
        for name, address in self.admins.items():
            text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if "le" not in sample.labels:
                        labels = ",".join(sample.labels.values())
                        found[name, sample.name, labels] = sample.value
        return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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


def table(lines: Sequence[Sequence[object]]) -> str:
    """Columns as wide as they need to be. Numbers have four digits and stand to the right."""
    shown = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line]
             for line in lines]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    right = [
        any(isinstance(line[column], int | float) for line in lines)
        for column in range(len(widths))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in shown
    )


def write_json(path: Path | None, found: object) -> None:
    """Writes what a benchmark found, if a file was named."""
    if path is not None:
        path.write_text(json.dumps({**_origin(), "found": found}, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Reads what `write_json` wrote."""
    return json.loads(path.read_text())["found"]


def _origin() -> dict[str, str]:
    import torch

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    on_gpu = torch.cuda.is_available()
    return {
        "command": shlex.join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu, {platform.machine()}",
        "torch": torch.__version__,
    }
