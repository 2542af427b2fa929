"""What `bench.kv_wire` and `bench.kv_wire_ranks` share: the pages of a push, and their waits."""

from __future__ import annotations

from multiprocessing.connection import Connection

import numpy as np

from kv_transfer.types import PageIds

POLL_S = 5e-5
UNCOUNTED = 2
"""The first repeats, which do not count."""
WAIT_S = 60.0
Pipe = Connection


def scattered(rng: np.random.Generator, num_pages: int, count: int, run: int) -> PageIds:
    """`count` pages out of so many, in runs of `run` adjacent ones, the runs in any order."""
    starts = rng.permutation(num_pages // run)[: -(-count // run)] * run
    return (starts[:, None] + np.arange(run)).reshape(-1)[:count].astype(np.int32)
