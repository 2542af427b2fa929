"""FlashAttention-3's operator for machines without a GPU: the schema that its wheel of 2026-08-10
registers, computed by SDPA."""

from __future__ import annotations

from itertools import pairwise

import torch
from flash_attn_like import attend, int32
from torch import Tensor

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0, Tensor? sinks=None) -> "
    "(Tensor(out!), Tensor, Tensor, Tensor)"
)


def forward(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, ...]:
    """The operator's arguments in order, without those at the end that are as by default."""
    given = DEFAULTS | dict(zip(DEFAULTS, rest, strict=False))
    starts, key_starts = given["cu_seqlens_q"], given["cu_seqlens_k"]
    assert isinstance(starts, Tensor)
    assert given["is_causal"]
    out, table, used = torch.empty_like(q), given["page_table"], given["seqused_k"]
    bounds = int32(starts).tolist()
    for row, (first, last) in enumerate(pairwise(bounds)):
        assert last - first <= given["max_seqlen_q"]
        if table is None:
            begin, end = int32(key_starts)[row : row + 2].tolist()
            assert end - begin <= given["max_seqlen_k"]
            keys, values = k[begin:end], v[begin:end]
        else:
            length, pages = int(int32(used)[row]), int32(table)[row].long()
            pages = pages[: -(-length // k.shape[1])]
            keys, values = (each[pages].flatten(0, 1)[:length] for each in (k, v))
        window = given["window_size_left"], given["window_size_right"]
        out[first:last] = attend(q[first:last], keys, values, True, window, given["softmax_scale"])
    return out, q.new_empty(0), q.new_empty(0), q.new_empty(0)


DEFAULTS = {
    each.name: each.default_value
    for each in torch._C.parse_schema(f"flash_attn_3::{SCHEMA}").arguments[3:]
}


def registered(schema: str = SCHEMA) -> torch.library.Library:
    """Registers the operator for CPUs. It is there until the library is destroyed."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define(schema)
    library.impl("fwd", forward, "CPU")
    return library


def decode(q, pool, layer, contexts, page_table, spec, _divided) -> Tensor:
    """See `engine.attention.fa3.DecodeKernel`."""
    keys, values = (each.transpose(1, 2) for each in pool.layer(layer))
    rows = q.view(len(contexts), -1, *q.shape[1:])
    window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
    out = []
    for row, length, table in zip(rows, contexts.tolist(), page_table, strict=True):
        pages = table[: -(-length // pool.page_size)].long()
        seen = [each[pages].flatten(0, 1)[:length] for each in (keys, values)]
        out.append(attend(row, *seen, True, window, spec.scale))
    return torch.cat(out)
