"""Calls of hooks before the first step, where no graph is captured.

What a hook compiles at its first call would count as its time, and its first request would fail. A
captured graph has made the calls already. Without graphs the same hooks are called once, with a row
that does not exist.
"""

from __future__ import annotations

import torch

from engine.hooks.steps import StepHooks
from engine.step.hooks import DecodeRows, HookSite
from engine.types import SCRATCH_PAGE


@torch.inference_mode()
def warm(
    hooks: StepHooks, site: HookSite, *, heads: int, max_pages: int, integers: torch.dtype
) -> None:
    """Calls those that fit graphs as while one is captured: in every layer, with a decode row of
    one token that is not narrowed. Its page table has as many columns as any.

    Args:
        hooks: the hooks of a rank.
        site: where they are attached.
        heads: query heads of this rank.
        max_pages: pages of the longest context.
        integers: of tables, contexts and counts in the steps to come.

    Raises:
        HookError: a call failed.
    """
    pool = site.pool
    hooks.capture()
    most = min(hooks.graph_pages, max_pages) if site.decodes else 0
    if most:
        table = torch.full((1, max_pages), SCRATCH_PAGE, dtype=integers, device=pool.device)
        one = torch.ones(1, dtype=integers, device=pool.device)
        hooks.choosing_began(DecodeRows(table, one, torch.zeros_like(one), most, pool.page_size))
    q = torch.zeros(1, heads, pool.head_dim, dtype=pool.dtype, device=pool.device)
    k = torch.zeros(1, pool.num_kv_heads, pool.head_dim, dtype=pool.dtype, device=pool.device)
    for layer in range(pool.num_layers):
        hooks.attention_began(layer, q, k, k)
        if most and site.may_choose(layer):
            hooks.pages_wanted(layer, q, (1, pool.num_kv_heads, most))
        hooks.attention_ended(layer, q, q)
    hooks.check_captured()
    if pool.device.type == "cuda":
        torch.cuda.synchronize(pool.device)  # Steps run on another stream.
