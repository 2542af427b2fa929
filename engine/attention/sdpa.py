"""Attention with PyTorch's own operators. It runs everywhere and is the reference for the others.

1. Once a step, `begin` computes the data that all layers share: the places in the pool that each
   row reads, and the positions in them that it must not see. Layers with equal windows share one
   view.
2. A call stores the layer's new K and V, gathers the places and attends. Decode rows are one padded
   batch, prompt rows are computed one by one. A prompt row that begins at position 0 gathers
   nothing. Of latents, decode rows read what is stored (the weights of K and V are absorbed by q
   and the output), and prompt rows make K and V of heads first.

A row reads only the pages of positions [first visible of its first new token, context). So a
sliding window bounds the work, and not just the mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.pool.kv_pool import KvPool
from engine.step.attention import AttentionBatch, AttentionSpec, Specs

HIDDEN = float("-inf")


class _DecodeView(NamedTuple):
    """The pages that B decode rows read, padded to the longest row."""

    places: Tensor
    """Places of pages [B, P], by `KvPool.places`."""
    hidden: Tensor
    """[B, 1, 1, P * page_size], True at positions that a row must not see."""


class _PromptView(NamedTuple):
    """The L positions that one row of several new tokens reads."""

    new: slice
    """The row's tokens among the step's."""
    places: Tensor | None
    """Places of pages [P], by `KvPool.places`; None: only the row's own new tokens."""
    seen: slice
    """The L positions within the gathered pages."""
    mask: Tensor | None
    """[tokens, L], added to the logits; None: a causal mask only."""


class _StepView(NamedTuple):
    """The views of layers with one window in one step."""

    decodes: _DecodeView | None
    prompts: list[_PromptView]


class SdpaBackend:
    """`AttentionBackend` over `scaled_dot_product_attention` and batched products."""

    name = "sdpa"

    def __init__(self, pool: KvPool, specs: Specs) -> None:
        self._pool = pool
        self._specs = specs
        self._device = pool.device

    def begin(self, batch: AttentionBatch) -> None:
        """See `AttentionBackend`."""
        self._batch = batch
        self._views = {
            window: self._view(batch, window) for window in {spec.window for spec in self._specs}
        }

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        batch, spec = self._batch, self._specs[layer]
        view = self._views[spec.window]
        k, v = self._pool.write(layer, batch.token_pages, batch.token_offsets, k, v)
        outs = [
            self._prompt(layer, q[row.new], k[row.new], v[row.new], row, spec)
            for row in view.prompts
        ]
        if view.decodes is not None:
            outs.insert(0, self._decode(layer, q[: batch.num_decodes], view.decodes, spec))
        return torch.cat(outs)

    def attend_ends(self, layer: int, q: Tensor, contexts: Tensor, page_table: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        spec = self._specs[layer]
        at = torch.arange(page_table.shape[1] * self._pool.page_size, device=self._device)
        hidden = at >= contexts[:, None]
        if spec.window is not None:
            hidden |= at < contexts[:, None] - spec.window
        view = _DecodeView(self._pool.places(page_table.long()), hidden[:, None, None])
        return self._decode(layer, q, view, spec)

    def _view(self, batch: AttentionBatch, window: int | None) -> _StepView:
        prompts, first = [], batch.num_decodes
        for row in range(batch.num_decodes, len(batch.query_lens)):
            prompts.append(self._prompt_view(batch, row, first, window))
            first += int(batch.query_lens[row])
        return _StepView(self._decode_view(batch, window) if batch.num_decodes else None, prompts)

    # -- decode rows ----------------------------------------------------------------------------

    def _decode_view(self, batch: AttentionBatch, window: int | None) -> _DecodeView:
        size, count = self._pool.page_size, batch.num_decodes
        on_host = torch.from_numpy(batch.context_lens[:count].astype("int64"))[:, None]
        starts = (on_host - (window or int(on_host.max()))).clamp_min_(0)
        first_pages = starts // size
        width = int((-(-on_host // size) - first_pages).max())
        columns = (first_pages + torch.arange(width)).to(self._device)
        lens, starts = on_host.to(self._device), starts.to(self._device)
        table = batch.page_table[:count].long()
        # Columns past a row's end read some page twice. They are hidden, like all past its context.
        pages = table.gather(1, columns.clamp_max(table.shape[1] - 1))
        at = columns.repeat_interleave(size, 1) * size
        at += torch.arange(size, device=self._device).repeat(width)
        hidden = (at >= lens) | (at < starts)
        return _DecodeView(self._pool.places(pages), hidden[:, None, None])

    def _decode(self, layer: int, q: Tensor, view: _DecodeView, spec: AttentionSpec) -> Tensor:
        """Attention of q [B, Hq, D]. The query heads of a group share one product with their KV
        head."""
        keys, values = self._pool.gather(layer, view.places)
        if spec.latents is not None:
            q = spec.latents.absorbed(q)
        grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[2])
        logits = _capped(torch.matmul(grouped * spec.scale, keys.transpose(-1, -2)), spec)
        # Filled, not added: finite bytes in a page's tail may give infinite products.
        logits.masked_fill_(view.hidden, HIDDEN)
        sinks = None if spec.sinks is None else spec.sinks.view(grouped.shape[1:3])[..., None]
        out = _read(_weights(logits, sinks), values, view.hidden.mT).flatten(1, 2)
        return out if spec.latents is None else spec.latents.values(out)

    # -- prompt rows ----------------------------------------------------------------------------

    def _prompt_view(
        self, batch: AttentionBatch, row: int, first: int, window: int | None
    ) -> _PromptView:
        size, length = self._pool.page_size, int(batch.context_lens[row])
        begin = length - int(batch.query_lens[row])
        start = 0 if window is None else max(0, begin - window + 1)
        new = slice(first, first + length - begin)
        mask = None
        if begin > 0 or (window is not None and window < length):
            mask = self._prompt_mask(begin, start, length, window)
        if begin == 0:
            return _PromptView(new, None, slice(0, length), mask)
        pages = batch.page_table[row, start // size : -(-length // size)].long()
        skipped = start // size * size
        return _PromptView(
            new, self._pool.places(pages), slice(start - skipped, length - skipped), mask
        )

    def _prompt_mask(self, begin: int, start: int, length: int, window: int | None) -> Tensor:
        """The mask of new positions [begin, length) over positions [start, length)."""
        at = torch.arange(start, length, device=self._device)
        own = torch.arange(begin, length, device=self._device)[:, None]
        hidden = at > own
        if window is not None:
            hidden |= at <= own - window
        mask = torch.zeros(hidden.shape, dtype=self._pool.dtype, device=self._device)
        return mask.masked_fill_(hidden, HIDDEN)

    def _prompt(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, row: _PromptView, spec: AttentionSpec
    ) -> Tensor:
        q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        if row.places is not None:
            keys, values = self._pool.gather(layer, row.places)
            k, v = keys[:, row.seen], values[:, row.seen]
        if spec.latents is not None:
            k, v = (made.transpose(0, 1) for made in spec.latents.of_heads(k[0]))
        if spec.soft_cap is not None or spec.sinks is not None:
            return _written_out(q, k, v, row.mask, spec).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            row.mask,
            is_causal=row.mask is None,
            scale=spec.scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


def _read(weights: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Products of weights [B, H, G, T] and values [B, H, T, D].

    Those values that are `hidden` [B, 1, T, 1] have no weight. They may be what a request left that
    computed NaN, and 0 * NaN is NaN. On a CPU it costs less to look.
    """
    if values.device.type == "cpu":
        out = torch.matmul(weights, values)
        if bool(out.isfinite().all()):
            return out
    return torch.matmul(weights, values.masked_fill(hidden, 0.0))


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """What PyTorch's operator cannot: caps and sinks. One KV head after the other, because all
    logits of a long prompt would take much memory.

    `q` [Hq, T, D], `k` and `v` [Hkv, L, D]; returns [Hq, T, D].
    """
    tokens, group = q.shape[1], q.shape[0] // k.shape[0]
    if mask is None:
        mask = torch.full((tokens, k.shape[1]), HIDDEN, dtype=q.dtype, device=q.device).triu_(1)
    out = torch.empty_like(q)
    for kv_head, (keys, values) in enumerate(zip(k, v, strict=True)):
        own = slice(kv_head * group, (kv_head + 1) * group)
        logits = _capped(torch.matmul(q[own] * spec.scale, keys.T), spec) + mask
        sinks = None if spec.sinks is None else spec.sinks[own, None, None]
        out[own] = torch.matmul(_weights(logits, sinks), values)
    return out


def _capped(logits: Tensor, spec: AttentionSpec) -> Tensor:
    return logits if spec.soft_cap is None else (logits / spec.soft_cap).tanh_() * spec.soft_cap


def _weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """[..., L]; `sinks` has a logit for each row, and its weight is left out."""
    if sinks is None:
        return logits.softmax(-1, dtype=torch.float32).to(logits.dtype)
    sinks = sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)
    weights = torch.cat((logits, sinks), dim=-1).softmax(-1, dtype=torch.float32)
    return weights[..., :-1].to(logits.dtype)
