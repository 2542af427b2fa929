"""Loading keeps no second copy of the weights in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

LOAD = """
import json, re, sys, threading, time
import torch
from engine.model import load_model
from engine.model.shard import Shard

def resident():
    # Without pages of files: those of a checkpoint go when memory is needed.
    text = open("/proc/self/status").read()
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", text)[1])

def load(folder):
    dtype, shard = getattr(torch, sys.argv[2]), Shard(0, int(sys.argv[4]))
    return load_model(folder, dtype=dtype, device=torch.device("cpu"), shard=shard)

torch.set_num_threads(1)
load(sys.argv[3])  # what is imported and built on the first use
before, peak, stop = resident(), 0, threading.Event()

def watch():
    global peak
    while not stop.is_set():
        peak = max(peak, resident())
        time.sleep(0.0005)

watching = threading.Thread(target=watch)
watching.start()
model = load(sys.argv[1]).model
loaded, loading = resident(), peak
model.finish()
stop.set()
watching.join()
sizes = (p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({
    "weights": sum(sizes), "loading": loading - before,
    "loaded": loaded - before, "packing": peak - before, "packed": resident() - before,
}))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A model of about 100 MB in float32, and a small one."""
    path = tmp_path_factory.mktemp("models")
    large = write_tiny_model(path / "large", layers=12, hidden=512, heads=8, tokenizer=False)
    return large, write_tiny_model(path / "small", tokenizer=False)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("dtype", "ranks"),
    [
        ("float32", 1),
        pytest.param("float32", 2, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1, marks=pytest.mark.slow),
    ],
)
def test_the_weights_are_in_memory_once(folders, dtype, ranks) -> None:
    """A rank of two has its half, and never more."""
    large, small = folders
    command = [sys.executable, "-c", LOAD, str(large), dtype, str(small), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout)
    once = 1.25 * found["weights"] + 8e6  # a tensor on its way, the allocator's leftovers
    assert found["weights"] > 40e6 / ranks
    assert 0.9 * found["weights"] < found["loaded"] < once
    assert found["loading"] < once, "while it is read"
    assert found["packing"] < once, "while it is packed"
    assert found["packed"] < once
