"""`flash_attn` as documented, for machines without a GPU: the two functions that
the engine calls, with their parameters, layouts and refusals, computed by SDPA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE_MULTIPLE = 256


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D]; k, v [S, Hkv, D], or [pages, page, Hkv, D] with a block table."""
    starts, ends = int32(cu_seqlens_q).tolist(), int32(cu_seqlens_k).tolist()
    assert len(starts) == len(ends)
    out = torch.zeros_like(q)
    for row in range(len(starts) - 1):
        first, last, length = starts[row], starts[row + 1], ends[row + 1] - ends[row]
        assert last - first <= max_seqlen_q
        assert length <= max_seqlen_k
        if block_table is None:
            keys, values = (t[ends[row] : ends[row + 1]] for t in (k, v))
        else:
            keys, values = (_from_pages(t, block_table[row], length) for t in (k, v))
        out[first:last] = attend(q[first:last], keys, values, causal, window_size, softmax_scale)
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """q [B, N, Hq, D]; caches [pages, page, Hkv, D]."""
    assert k is v is None
    assert block_table is not None
    assert isinstance(cache_seqlens, Tensor)
    rows = [
        attend(
            q[row],
            _from_pages(k_cache, block_table[row], length),
            _from_pages(v_cache, block_table[row], length),
            causal,
            window_size,
            softmax_scale,
        )
        for row, length in enumerate(int32(cache_seqlens).tolist())
    ]
    return torch.stack(rows)


def int32(tensor: Tensor) -> Tensor:
    assert tensor.dtype == torch.int32
    return tensor


def _from_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """[length, Hkv, D]"""
    assert cache.shape[1] % PAGE_MULTIPLE == 0, "Paged KV cache block size must be divisible by 256"
    assert cache.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    used = int32(pages)[: -(-length // cache.shape[1])].long()
    return cache[used].flatten(0, 1)[:length]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """Causal and windowed from the bottom right corner, as the library does since 2.1."""
    ahead = torch.arange(len(k))[None] - torch.arange(len(k) - len(q), len(k))[:, None]
    left, right = window
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if left >= 0:
        hidden |= ahead < -left
    if right >= 0 or causal:
        hidden |= ahead > (0 if causal else right)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, ~hidden, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)
