"""Runs the kernels over shared memory in Triton's interpreter, against float64.

A script of its own, because Triton looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import sys

import torch
from ranks_kit import (
    Ranks,
    check_best,
    check_gather,
    check_halves_take_turns,
    check_sums,
    check_waits,
)

CPU = torch.device("cpu")
SHAPES = [(1, 40), (5, 40), (19, 24)]


def main() -> None:
    """One case of each kernel, or all cases."""
    every = sys.argv[1:] == ["all"]
    for count in (2, 3, 8) if every else (3,):
        ranks = Ranks(count, CPU, half_bytes=1 << 14)
        for rows, size in SHAPES if every else SHAPES[1:2]:
            for dtype in (torch.float32, torch.bfloat16):
                for shots in (1, 2):
                    check_sums(ranks, rows, size, dtype, shots)
        check_gather(ranks, 3, 3)
        check_gather(ranks, 1, 1)  # What a rank tells of its one hook.
        check_gather(ranks, 700 if every else 3, 3)
        check_waits(ranks)
        check_best(count, 9001 if every else 701, torch.bfloat16, CPU)
    check_halves_take_turns(CPU)
    print("equal")


if __name__ == "__main__":
    main()
