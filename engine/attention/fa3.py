"""FlashAttention-3 over the paged pool (Shah et al. 2024), on Hopper GPUs.

Prompt rows use the library, which reads the pool's strided views in place. Prompts that begin at
position 0 attend over the new K and V in place, without pages. Decode rows use
`engine.cuda.decode_attention`.

The library's functions go through an autograd function, a custom operator and a guard of torch's
compiler, none of which a forward pass needs. In a profile on an H200's host they took 0.27 ms of a
layer, and the operator 0.08 (8a37d250). A step without a graph is launched layer by layer, so that
its host time may be longer than the device's.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from engine.attention.paged import PagedAttention, PagedStep, views_of
from engine.attention.parts import Division, TileSet, division, tiles_of
from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionSpec, Specs

LONG_PIECE = 192
LONG_PIECE_SPLITS = 2
"""The longest chunk of a prompt beside decode rows reads its keys in this many parts. The library
would use more parts and leave less room for decode rows. On an H200, a chunk behind 7,800 tokens
beside 8 decode rows of 8,000 tokens takes 10.8 ms, and took 11.2 ms with the library's choice. For
shorter chunks the library chooses."""

SINKS_OPTIONS = ("s_aux", "learnable_sink")
"""What versions of the library call the sinks."""


PASSED: Final = frozenset(
    {
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k",
        "page_table", "softmax_scale", "is_causal", "window_size_left", "window_size_right",
        "num_splits",
    }
)  # fmt: skip
"""The operator's arguments that we give. The others have defaults that turn them off."""


class Fa3Operator:
    """The library's two functions that `Fa3Backend` calls, with the same names and arguments.

    All tensors must be contiguous in their last dimension, as the engine's are.
    """

    def __init__(self, forward: Any) -> None:
        """`forward`: the operator."""
        self._forward = forward

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        max_query: int,
        max_key: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        num_splits: int = 1,
    ) -> Tensor:
        """Rows of different lengths: q [T, Hq, D] over k and v [S, Hkv, D]; returns [T, Hq, D]."""
        out: Tensor = self._forward(
            q,
            k,
            v,
            cu_seqlens_q=query_starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=max_query,
            max_seqlen_k=max_key,
            softmax_scale=softmax_scale,
            is_causal=causal,
            window_size_left=window_size[0],
            window_size_right=window_size[1],
            num_splits=num_splits,
        )[0]
        return out

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        num_splits: int,
    ) -> Tensor:
        """q [T, Hq, D] over pages [pages, page_size, Hkv, D]; returns [T, Hq, D]."""
        out: Tensor = self._forward(
            q,
            keys,
            values,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=cache_seqlens,
            max_seqlen_q=max_seqlen_q,
            page_table=page_table,
            softmax_scale=softmax_scale,
            is_causal=causal,
            window_size_left=window_size[0],
            window_size_right=window_size[1],
            num_splits=num_splits,
        )[0]
        return out


Fa3Library = ModuleType | Fa3Operator
"""What the backends of FlashAttention-3 call."""


def by_operator(library: ModuleType) -> Fa3Library:
    """The library's operator; `library` itself, if that has registered none that takes what we
    give, or asks for more."""
    try:
        forward = torch.ops.flash_attn_3.fwd.default
    except AttributeError:
        return library
    arguments = forward._schema.arguments
    needed = {each.name for each in arguments if not each.has_default_value()}
    fits = needed <= PASSED <= {each.name for each in arguments}
    return Fa3Operator(forward) if fits else library


def splits_of(step: PagedStep) -> int:
    """Parts in which a prompt's keys are read; 0: the library chooses."""
    return LONG_PIECE_SPLITS if step.max_query == LONG_PIECE else 0


def sinks_option(library: Fa3Library) -> str:
    """The name of the library's argument for sinks; empty: it has none."""
    known = inspect.signature(library.flash_attn_varlen_func).parameters
    return next((name for name in SINKS_OPTIONS if name in known), "")


class DecodeKernel(Protocol):
    """`engine.cuda.decode_attention.decode_attention`, which some machines cannot import, or that
    of another precision."""

    def __call__(
        self,
        q: Tensor,
        pool: KvPool,
        layer: int,
        contexts: Tensor,
        page_table: Tensor,
        spec: AttentionSpec,
        divided: Division,
    ) -> Tensor:
        """See there."""
        ...


class Fa3Backend(PagedAttention):
    """`PagedAttention` over `flash_attn_interface`."""

    name = "fa3"
    tiles: TileSet | None = None
    """Tiles for decode rows; None: by the size of heads."""

    def __init__(
        self,
        pool: KvPool,
        specs: Specs,
        kernels: Fa3Library,
        decode: DecodeKernel,
    ) -> None:
        super().__init__(pool, specs, kernels)
        self._decode_kernel = decode
        self._views = views_of(pool)
        self._sinks_option = ""
        if any(spec.sinks is not None for spec in specs):
            self._sinks_option = sinks_option(kernels)

    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """See `PagedAttention`."""
        tiles, kv_heads = self.tiles or tiles_of(self._pool.head_dim), self._pool.num_kv_heads
        divided = division(len(contexts), kv_heads, differ=self._step.differ, tiles=tiles)
        spec = self._specs[layer]
        return self._decode_kernel(q, self._pool, layer, contexts, page_table, spec, divided)

    def more_options(self, layer: int) -> dict[str, Tensor]:
        """See `PagedAttention`."""
        sinks = self._specs[layer].sinks
        return {} if sinks is None else {self._sinks_option: sinks}

    def _continued_prompts(
        self, layer: int, q: Tensor, step: PagedStep, window: tuple[int, int]
    ) -> Tensor:
        keys, values = self._views[layer]
        first = step.num_decodes
        out: Tensor = self._kernels.flash_attn_with_kvcache(
            q,
            keys,
            values,
            cache_seqlens=step.context_lens[first:],
            page_table=step.page_table[first:],
            cu_seqlens_q=step.query_starts,
            max_seqlen_q=step.max_query,
            softmax_scale=self._specs[layer].scale,
            causal=True,
            window_size=window,
            num_splits=splits_of(step),
            **self.more_options(layer),
        )
        return out
