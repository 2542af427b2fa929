"""Expert groups on GPUs: kernels over the memory of several workers on one device, and workers in
processes of their own, on two GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from groups_kit import check_moving
from ranks_kit import Ranks, check_sums
from references import first_difference
from test_cuda_ranks import (
    CLOSE,
    EXPERTS,
    LENGTHS,
    SCORED,
    TOKENS,
    build_on_gpus,
    margin_of,
    runs_of,
)
from tiny_models import write_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
CUDA = torch.device("cuda")
two_gpus = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
GONE_S = 6.0
SHARED = {
    "family": "qwen2_moe", "num_experts": 16, "num_experts_per_tok": 4, "hidden": 256, "heads": 4,
    "kv_heads": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128,
}  # fmt: skip
"""With a gate on the expert that all tokens share."""
SIZES = {"max_step_tokens": 256, "max_sequences": 12, "num_pages": 600}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("size", [2048, 576])
def test_rows_and_sums_on_one_device(count, size):
    ranks = Ranks(count, CUDA, programs=128, half_bytes=1 << 24)
    for tokens, rows in ([1, 0, 1, 1], 1), ([7, 64, 3, 30], 64), ([300, 1, 17, 299], 300):
        for pads in (True, False):
            check_moving(ranks, tokens[:count], rows, size, torch.bfloat16, pads=pads)
        check_sums(ranks, rows, size, torch.bfloat16, 1)


class Worker:
    """A process of a group."""

    def __init__(self, model: Path, place: str, options: dict[str, Any]) -> None:
        script = Path(__file__).with_name("group_process.py")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, script, str(model), place, json.dumps(options)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def tell(self, *lengths: int, tokens: int = 0) -> None:
        """Gives it prompts, and waits until it has them."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([lengths, tokens]) + "\n")
        self.process.stdin.flush()
        assert self.heard() == "ready"

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def answers(self) -> Any:
        return json.loads(self.heard())


@contextmanager
def grouped(model: Path, count: int = 2, **options: Any) -> Iterator[list[Worker]]:
    """Workers, each on a GPU of its own, ready. No process is left."""
    place = f"{model.parent / 'group'}?rank={{}}&ranks={count}"
    with ExitStack() as stack:
        workers = [Worker(model, place.format(rank), SIZES | options) for rank in range(count)]
        for worker in workers:
            stack.callback(worker.process.wait, 60)
            stack.callback(worker.process.kill)
        for worker in workers:
            assert worker.heard() == "ready symmetric memory"
        yield workers


@two_gpus
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("shape", [EXPERTS, SHARED], ids=["experts", "shared"])
def test_two_workers_have_the_tokens_of_one(shape, graphs, tmp_path):
    """Alone, beside the other's rows, and all at once, up to the first token that rounding
    decides. Prompts and rows have no size in common; rows alone have."""
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **shape)
    one = build_on_gpus(path, 1)
    wanted = {len(run.request.prompt_ids): run for run in runs_of(one, SCORED)}
    one.stop()
    same = told = 0
    with grouped(path, cuda_graphs=graphs) as workers:
        for lengths in ((LENGTHS, ()), ((), LENGTHS), (LENGTHS[::2], LENGTHS[1::2]), ((17,), (1,))):
            for worker, own in zip(workers, lengths, strict=True):
                worker.tell(*own)
            for worker, own in zip(workers, lengths, strict=True):
                for length, got in zip(own, worker.answers(), strict=True):
                    run = wanted[length]
                    at = first_difference(got, run.tokens[0])
                    assert at == TOKENS or margin_of(run.records[0][at]) < CLOSE, (length, at)
                    same, told = same + at, told + 1
    assert told == 3 * len(LENGTHS) + 2
    assert same > TOKENS * told // 4


@two_gpus
def test_two_workers_in_fp8(tmp_path):
    """Both have the same tokens, however rows are divided between them."""
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **EXPERTS)
    with grouped(path, quantization="fp8") as workers:
        found = []
        for lengths in ((LENGTHS, ()), ((), LENGTHS)):
            for worker, own in zip(workers, lengths, strict=True):
                worker.tell(*own)
            found.append([each for worker in workers for each in worker.answers()])
    agree = sum(first_difference(*pair) for pair in zip(*found, strict=True))
    assert agree > TOKENS * len(LENGTHS) // 2


@two_gpus
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_one_ends_the_other(rank, sign, tmp_path):
    """Its device waits for the one that is gone, in a graph."""
    path = write_tiny_model(tmp_path / "model", tokenizer=False, **EXPERTS)
    with grouped(path) as workers:
        for worker in workers:
            worker.tell(20, tokens=1900)
        time.sleep(0.5)
        began_s = time.monotonic()
        workers[rank].process.send_signal(sign)
        told = workers[1 - rank].answers()
        assert time.monotonic() - began_s < GONE_S
        assert "expert group" in told
        other = workers[1 - rank].process
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(30) == 0
