"""What workers need is compared with what is free, and the message says what would fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny_model

from console.room import check_room
from engine import memory
from engine.checkpoints import Weights, weights_of
from engine.config import EngineConfig
from engine.engine import Engine, EngineError
from engine.memory import GIB, Need, NoRoomError, check
from engine.model import load_model
from worker.settings import WorkerDebug, WorkerSettings

BILLION = Weights(1_000_000_000, 0)


def need(**changes: object) -> Need:
    usual = {"weights": BILLION, "weight_bytes": 4, "pool_bytes": GIB, "on_gpu": False}
    return Need(**{**usual, **changes})


@pytest.mark.parametrize(
    ("wanted", "free_gib", "complaint"),
    [
        (
            need(),
            4,
            r"needs 5.2 GiB, 4.0 are free on here \(one worker with 3.7 of weights and 1.0",
        ),
        (need(), 4, r"dtype bfloat16 \(BATON_DTYPE\) needs 3.4"),
        (need(weight_bytes=2, pool_bytes=4 * GIB), 4, "kv_memory_gib 1.6 fits"),
        (need(weight_bytes=2, workers=3), 7, "needs 10.1 .* there is room for 2 such workers"),
        (need(weight_bytes=2, workers=2, on_gpu=True), 4, "give each worker a GPU"),
        (need(weight_bytes=2), 1, "take a smaller model, or more memory"),
        (need(weights=Weights(10**9, 10**9), pool_bytes=0), 5, "needs 8.0"),
    ],
)
def test_too_much_is_refused_with_what_would_fit(
    wanted: Need, free_gib: int, complaint: str
) -> None:
    with pytest.raises(NoRoomError, match=complaint) as caught:
        check(wanted, free_gib * GIB, "here")
    assert "\n" not in str(caught.value)
    check(wanted, wanted.all_bytes, "here")


def test_weights_are_counted_as_they_are_loaded(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    counted: list[Weights] = []
    cpu = torch.device("cpu")
    load_model(str(folder), dtype=torch.float32, device=cpu, check=counted.append)
    assert counted == [weights_of(Path(folder))]
    assert weights_of(tmp_path) is None


def test_all_workers_of_a_device_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_tiny_model(tmp_path / "model"))
    settings = WorkerSettings(model=folder, kv_memory_gib=2)
    monkeypatch.setattr(memory, "available_bytes", lambda: 6 * GIB)
    monkeypatch.setattr(memory, "free_gpu_bytes", {"0": 6 * GIB, "1": None}.get)
    check_room(settings, {"": 2})
    check_room(settings, {"0": 2, "1": 9})
    for workers_on in ({"": 3}, {"1": 1, "0": 3}):
        with pytest.raises(NoRoomError, match="3 workers, each with"):
            check_room(settings, workers_on)
    without = settings.model_copy(update={"debug": WorkerDebug(load_format="dummy")})
    check_room(without, {"": 3})


def test_a_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    free = memory.available_bytes()
    assert free > GIB // 4
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_bytes() > GIB // 4
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    (tmp_path / "memory.current").write_text(f"{GIB - 1000}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300\n")
    assert memory.available_bytes() == 1300


def test_a_model_without_room_is_refused_before_it_takes_any(tmp_path: Path) -> None:
    folder = Path(write_tiny_model(tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"], config["num_hidden_layers"] = 1 << 24, 200
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"the model needs .* are free on this machine"):
        Engine.build(EngineConfig(model=str(folder), device="cpu", load_format="dummy"))


def test_what_would_fit_a_gpu_is_named() -> None:
    """Weights of bf16 that are rounded while they are loaded, if they are not quantised already."""
    sizes = Weights(count=12 * GIB, tied=0, outside=GIB)
    options = {"dtype": "bfloat16", "kv_memory_bytes": 0, "num_pages": 0, "on_gpu": True}
    with pytest.raises(NoRoomError, match=r"needs 24.5 GiB, 20.0 are free.*fp8.*needs 13.5$"):
        memory.check(memory.need_of(sizes, **options), 20 * GIB, "cuda:0")
    packed = replace(sizes, count=GIB, packed_bytes=23 * GIB)
    for weights, free in ((sizes, 12 * GIB), (packed, 20 * GIB)):
        with pytest.raises(NoRoomError, match="take a smaller model, or more memory"):
            memory.check(memory.need_of(weights, **options), free, "cuda:0")
