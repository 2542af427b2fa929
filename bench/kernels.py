"""What benchmarks of kernels share: batches of decode rows, and the time of calls in a graph."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from engine.attention.parts import Division, TileSet, division, lengths_differ
from engine.cuda.decode_attention import decode_attention
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionSpec

PAGE_TOKENS: Final = 16
LAYERS: Final = 4
"""A call in a graph takes another layer than the one before, so that no cache has its pages."""
CALLS, REPLAYS = 8, 5
WRITTEN_AT_ONCE: Final = 1 << 16


def replayed_us(work: Callable[[], object]) -> float:
    """Median time of some work in a graph; infinite if the device has no room for its tiles."""
    try:
        work()
    except (OutOfResources, PTXASError):
        return float("inf")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(begin.elapsed_time(end)) / 2)
    return float(statistics.median(times))


class DecodeRows:
    """Rows with random KV in bf16: 32 query heads and 8 KV heads, unless `heads` says otherwise."""

    def __init__(
        self, lengths: Sequence[int], dim: int = 128, heads: tuple[int, int] = (32, 8)
    ) -> None:
        """`heads`: those of queries, and of KV."""
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.kv_heads, self._spec = heads[1], AttentionSpec(dim**-0.5)
        pages = -(-self.lengths // PAGE_TOKENS)
        self._pool = PlainPool(
            num_pages=int(pages.sum()) + 1, num_layers=LAYERS, num_kv_heads=heads[1], head_dim=dim,
            page_size=PAGE_TOKENS, dtype=torch.bfloat16, device=torch.device("cuda"),
        )  # fmt: skip
        every = torch.arange(self._pool.num_pages * PAGE_TOKENS, device="cuda")
        for at in every.split(WRITTEN_AT_ONCE):
            k, v = torch.randn(2, len(at), heads[1], dim, device="cuda", dtype=torch.bfloat16)
            for layer in range(LAYERS):
                self._pool.write(layer, at // PAGE_TOKENS, at % PAGE_TOKENS, k, v)
        order = torch.randperm(int(pages.sum())).int().split(pages.tolist())
        self._table = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True).cuda()
        self._contexts = self.lengths.cuda()
        shape = len(lengths), heads[0], dim
        self._q = torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def division(self, tiles: TileSet) -> Division:
        """The division that the engine chooses."""
        differ = lengths_differ(self.lengths.numpy(), self.kv_heads)
        return division(len(self.lengths), self.kv_heads, differ=differ, tiles=tiles)

    def attend(self, divided: Division) -> None:
        """Some calls."""
        for call in range(CALLS):
            layer = call % LAYERS
            decode_attention(
                self._q, self._pool, layer, self._contexts, self._table, self._spec, divided
            )
