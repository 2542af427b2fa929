"""Runs the kernels of expert groups in Triton's interpreter, against float64; then, with a folder
and models, workers of a group whose steps are those of a GPU, in one process, without graphs. Their
tokens are those of a worker by itself with PyTorch.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import interpreted_ptx
import torch
from engine_kit import Run, check_baseline, finish, running, submit
from expert_groups_kit import grouped
from groups_kit import check_moving
from interpreted_executor import OPTIONS, PROMPTS, patches, rounding, same
from interpreted_ranks_kit import Turns
from ranks_kit import Ranks, check_gather, check_sums
from test_ranks import FAMILIES
from tiny_models import write_tiny_model
from torch import Tensor

from engine.cuda.executor import CudaExecutor
from engine.cuda.groups.dispatch import CudaDispatch
from engine.engine import Engine
from engine.expert_groups import ranks as groups

CPU = torch.device("cpu")
WORKERS, TOKENS = 2, 3
SIZES = [((1, 3, 2, 1), 3, 40), ((9, 6, 0, 2), 9, 24), ((1,) * 4, 1, 72)]
"""Tokens of each worker, rows of all, numbers of a row."""


class Link:
    """Rows and sums through memory of the host."""

    shared = None

    def __init__(self, rank: int, turns: Turns) -> None:
        self._rank, self._turns = rank, turns

    def gather_on_all(self, x: Tensor) -> Tensor:
        return torch.stack(self._turns.exchange(self._rank, x.clone()))

    def scatter_sum(self, x: Tensor) -> Tensor:
        found = torch.stack(self._turns.exchange(self._rank, x.clone())).sum(0)
        return found.chunk(WORKERS)[self._rank]

    def let_go(self) -> None:
        """Nobody waits."""


def on_a_device() -> ExitStack:
    """Until it is closed, workers of groups run their steps so. One runs at a time, until it waits
    for the others: there is one interpreter."""
    turns, sizes = Turns(), []

    def dispatch_on(_device: torch.device, place: Any) -> CudaDispatch:
        made = CudaDispatch(place.rank, place.ranks, CPU)
        made._link = Link(place.rank, turns)
        made.join = lambda _: setattr(made, "_is_joined", True)
        return made

    def in_turn(method: Any) -> Any:
        def run(self: CudaExecutor, *given: Any) -> Any:
            sizes.append(self._moves.agreed)
            with turns.lock:
                return method(self, *given)

        return run

    stack = patches()
    stack.enter_context(rounding())
    stack.enter_context(patch.object(groups, "_dispatch_on", dispatch_on))
    for name in ("launch", "launch_padding"):
        own = in_turn(getattr(CudaExecutor, name))
        stack.enter_context(patch.object(CudaExecutor, name, own))
    stack.callback(lambda: check_sizes(sizes))
    return stack


def check_sizes(sizes: list[Any]) -> None:
    """Steps of all kinds have run."""
    found = {(size.in_graphs, size.rows) for size in sizes if size is not None}
    assert {is_padded for is_padded, _ in found} == {True, False}, found
    assert {(True, 1), (True, 2)} <= found, found


def check_model(model: str, folder: Path) -> None:
    """All prompts at one worker, then at both, beside rows of the other."""
    path = write_tiny_model(folder / model, tokenizer=False, **FAMILIES[model])
    prompts = [PROMPTS[1][:12], PROMPTS[0], PROMPTS[0][:1]]

    def answered(*engines: Engine) -> list[Run]:
        runs = []
        for several in ((engines[-1],), engines):
            now = [
                submit(several[at % len(several)], ids, TOKENS + at, ignore_eos=True)
                for at, ids in enumerate(prompts)
            ]
            finish(*now, timeout_s=600)
            runs += now
        for engine in engines:
            check_baseline(engine)
        return runs

    with running(path, **OPTIONS) as plain:
        wanted = answered(plain)
    with on_a_device(), grouped(path, folder / f"{model}-group", WORKERS, **OPTIONS) as engines:
        same(answered(*engines), wanted)


def main() -> None:
    """One case of each kernel, or all cases."""
    for model in sys.argv[2:]:
        interpreted_ptx.teach()
        check_model(model, Path(sys.argv[1]))
        print(model, "equal", flush=True)
    if sys.argv[2:]:
        return
    every = sys.argv[1:] == ["all"]
    for count in (2, 3, 4) if every else (3,):
        ranks = Ranks(count, CPU, half_bytes=1 << 15)
        for tokens, rows, size in SIZES if every else SIZES[:1]:
            for dtype in (torch.float32, torch.bfloat16)[not every :]:
                for pads in (False, True):
                    check_moving(ranks, list(tokens[:count]), rows, size, dtype, pads=pads)
            check_sums(ranks, 3, 40, torch.float32, 1)  # Calls of all kinds take turns.
        check_gather(ranks, 3, 3)
    print("equal")


if __name__ == "__main__":
    main()
