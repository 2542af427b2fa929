"""FlashAttention over the paged pool: the parts that its generations share.

It has two entries and one set of calls:
- as a plain `AttentionBackend`, `begin` takes a batch from the host, and a call stores K and V;
- the CUDA executor stores K and V in a fused kernel, describes a step with tensors that are on
  the device already (`prepare`) and calls `attend`. Nothing there waits for the device, so a graph
  can capture it.

The matrix units limit prompts, and memory limits decode rows. So both are computed beside each
other (as in POD-Attention, Kamath et al. 2024, but by separate kernels on two streams).

A library sees the pool as strided views, one pair a layer, made once (`views_of`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.beside import Beside
from engine.attention.parts import lengths_differ
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionBatch, AttentionSpec, Specs

Decode = Callable[[int, Tensor], Tensor | None]
"""Attention of decode rows [B * w, Hq, D] in a layer; None: it has none of its own there."""
ALL = (-1, -1)
"""The library's window without a limit: positions before a token's own, and after it."""


class PagedStep(NamedTuple):
    """R rows of a step in the form that the kernels read: decode rows, then prompt rows."""

    num_decodes: int
    context_lens: Tensor
    """[R] int32, tokens in KV after the step."""
    page_table: Tensor
    """[R, P] int32."""
    query_starts: Tensor | None
    """[prompt rows + 1] int32, the start of each prompt row's tokens among those of all prompt
    rows; None: there is no prompt row."""
    max_query: int
    """Most new tokens of a prompt row."""
    all_fresh: bool
    """Whether every prompt row begins at position 0."""
    differ: bool = True
    """Whether decode rows differ in length (`engine.attention.parts`)."""
    width: int = 1
    """New tokens of each decode row."""

    @property
    def decode_tokens(self) -> int:
        """New tokens of all decode rows."""
        return self.num_decodes * self.width


def window_of(spec: AttentionSpec) -> tuple[int, int]:
    """The library's window."""
    return ALL if spec.window is None else (spec.window - 1, 0)


def views_of(pool: KvPool) -> list[tuple[Tensor, Tensor]]:
    """Per layer, K and V as libraries read pages: [pages, page_size, Hkv, D]."""
    layers = map(pool.layer, range(pool.num_layers))
    return [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in layers]


class PagedAttention(ABC):
    """`AttentionBackend` whose kernels read pages. A subclass calls the library of its
    generation."""

    name: str

    def __init__(self, pool: KvPool, specs: Specs, kernels: Any) -> None:
        self._pool = pool
        self._kernels = kernels
        """The generation's module, or what has the same functions."""
        self._specs = specs
        self._beside = Beside(pool.device)

    def reserve(self, tokens: int, rows: int) -> None:
        """Makes room for steps whose prompt rows, at most `rows`, have contexts of at most `tokens`
        together. Only backends that gather pages need any."""
        return

    def more_options(self, layer: int) -> dict[str, Tensor]:
        """What a layer needs from the library beside scale and window."""
        return {}

    @abstractmethod
    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """One layer, from the w last positions of S rows, each over the stored tokens up to itself.

        `q` [S * w, Hq, D], `contexts` [S] and `page_table` [S, P] int32; returns [S * w, Hq, D].
        """

    @abstractmethod
    def _continued_prompts(
        self, layer: int, q: Tensor, step: PagedStep, window: tuple[int, int]
    ) -> Tensor:
        """Attention of prompts that were computed in part before, over pages."""

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        self._store_at = (batch.token_pages, batch.token_offsets)
        device, first = batch.page_table.device, batch.num_decodes
        queries = torch.from_numpy(batch.query_lens[first:]).to(torch.int32)
        starts = None
        if len(queries):
            starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).int()
            starts = starts.to(device, non_blocking=True)
        fresh = bool((batch.query_lens[first:] == batch.context_lens[first:]).all())
        self.prepare(
            PagedStep(
                num_decodes=first,
                context_lens=torch.from_numpy(batch.context_lens)
                .int()
                .to(device, non_blocking=True),
                page_table=batch.page_table.int(),
                query_starts=starts,
                max_query=int(batch.query_lens[first:].max(initial=0)),
                all_fresh=fresh,
                differ=lengths_differ(batch.context_lens[:first], self._pool.num_kv_heads),
                width=int(batch.query_lens[0]) if first else 1,
            )
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        pages, offsets = self._store_at
        k, v = self._pool.write(layer, pages, offsets, k, v)
        return self.attend(layer, q, k, v)

    def prepare(self, step: PagedStep) -> None:
        """Sets the step for the next calls of `attend`."""
        self._step = step

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decode: Decode | None = None
    ) -> Tensor:
        """One layer. The pool already has its K and V of this step. Shapes as in
        `AttentionBackend`. `decode` is for the decode rows instead of their own attention."""
        step, count = self._step, self._step.decode_tokens
        if step.query_starts is None:
            return self._decode(layer, q, decode)
        if count == 0:
            return self._prompts(layer, q, k, v)
        with self._beside:
            decodes = self._decode(layer, q[:count], decode)
        prompts = self._prompts(layer, q[count:], k[count:], v[count:])
        self._beside.wait()
        return torch.cat((decodes, prompts))

    def _decode(self, layer: int, q: Tensor, decode: Decode | None) -> Tensor:
        if decode is not None and (out := decode(layer, q)) is not None:
            return out
        step, count = self._step, self._step.num_decodes
        return self.attend_ends(layer, q, step.context_lens[:count], step.page_table[:count])

    def _prompts(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step = self._step
        window = window_of(self._specs[layer])
        if step.all_fresh:
            return self._fresh_prompts(layer, q, k, v, step, window)
        return self._continued_prompts(layer, q, step, window)

    def _fresh_prompts(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: PagedStep,
        window: tuple[int, int],
    ) -> Tensor:
        """Attention of prompts that begin at position 0, over their own K and V."""
        out: Tensor = self._kernels.flash_attn_varlen_func(
            q,
            k,
            v,
            step.query_starts,
            step.query_starts,
            step.max_query,
            step.max_query,
            softmax_scale=self._specs[layer].scale,
            causal=True,
            window_size=window,
            **self.more_options(layer),
        )
        return out
