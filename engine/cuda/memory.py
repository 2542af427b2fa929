"""Finds the GPU memory that is left for the KV pool, by running the largest step."""

from __future__ import annotations

import torch

from engine.attention.grouped import PagedGroups
from engine.attention.paged import PagedStep
from engine.bounds import Bounds
from engine.cuda.steps.handing import Handing
from engine.cuda.steps.shapes import LONGEST_GRAPH
from engine.cuda.wrapped import forward_of
from engine.groups.spec import State
from engine.model import Decoder
from engine.pool.pools import KvPools
from engine.step.dispatch import STAY
from engine.step.plan import STATE_COLUMNS
from engine.types import SCRATCH_PAGE

CONTEXT_BYTES = 1 << 30
"""More than what CUDA itself takes for a process."""
GRAPH_BYTES = 1 << 30
"""Bytes kept back for graphs, staging and tables. The memory of the largest graph comes on top."""
DRAFTS_BYTES = 4 << 30
"""Bytes kept back for graphs of wider decode rows, beside what `_bytes_for_drafts` counts. With the
8B shape, 256 rows and three drafts an engine took 4.8 GiB more in all."""
RANKS_BYTES = 1 << 30
"""Bytes kept back for what ranks share and for NCCL, which come later, where there are several, or
workers of an expert group."""
SAMPLING_COPIES = 6
"""Most float32 copies of a step's logits that the sampler holds at once."""


@torch.inference_mode()
def bytes_left(
    model: Decoder,
    scratch: KvPools,
    attention: PagedGroups,
    bounds: Bounds,
    utilization: float,
    drafts: int = 0,
) -> int:
    """Bytes that a pool may have. They are negative if the model alone is too large.

    Args:
        model: the loaded model.
        scratch: pools of the scratch page only, with the model's shape.
        attention: attention over `scratch`.
        bounds: bounds of the largest step.
        utilization: share of the device's memory that this process may use, in all. What others
            use counts only where they leave less than that.
        drafts: the most of a row; 0: none are verified.
    """
    device = scratch.first.device
    attention.reserve(bounds.scratch_tokens, bounds.max_sequences)  # For as long as it is measured.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    _run_largest(model, scratch, attention, bounds)
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_reserved(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    sampling = SAMPLING_COPIES * 4 * bounds.max_sequences * model.config.vocab_size
    graphs = GRAPH_BYTES + step * min(1.0, LONGEST_GRAPH / bounds.max_step_tokens)
    if bounds.max_adapters:  # Steps with adapters have graphs of their own.
        graphs += GRAPH_BYTES
    if model.collective.size > 1 or model.shard.stages > 1 or model.dispatch is not STAY:
        graphs += RANKS_BYTES
    if drafts:
        sampling += _bytes_for_drafts(bounds, model.config.vocab_size, drafts)
        graphs += DRAFTS_BYTES
    used = min(total - free, torch.cuda.memory_reserved(device) + CONTEXT_BYTES)
    return int(min(total * utilization - used, free) - step - sampling - graphs)


def _bytes_for_drafts(bounds: Bounds, vocab_size: int, drafts: int) -> int:
    """Bytes of the tables by slot, and of logits of all columns, in the model's dtype and in
    float32."""
    tables = 4 * (bounds.max_sequences + 1) * bounds.max_context_tokens
    return tables + 6 * bounds.max_sequences * (1 + drafts) * vocab_size


def _run_largest(model: Decoder, scratch: KvPools, attention: PagedGroups, bounds: Bounds) -> None:
    """Runs one prompt as long as a step may be. Every token is stored in the scratch page."""
    size, device, page_size = bounds.max_step_tokens, scratch.first.device, bounds.page_size
    positions = torch.arange(size, dtype=torch.int32, device=device)
    positions %= bounds.max_context_tokens
    lens = torch.full((1,), size, dtype=torch.int32, device=device)
    width = -(-size // page_size)
    table = torch.full((1, width), SCRATCH_PAGE, dtype=torch.int32, device=device)
    starts = torch.nn.functional.pad(lens, (1, 0))
    step = PagedStep(0, lens, table, starts, size, all_fresh=True)
    states = step._replace(page_table=table.new_zeros(1, STATE_COLUMNS))
    kinds = [spec.kind for spec in scratch.specs]
    attention.prepare([states if isinstance(kind, State) else step for kind in kinds])
    forward = forward_of(model, scratch, attention, bounds.max_context_tokens)
    stores = SCRATCH_PAGE * page_size + positions % page_size
    tokens, handing = torch.zeros_like(positions), Handing(model, size, lens)
    places = [stores] * len(scratch)
    hidden = forward.hidden(tokens, positions, places, states=handing.states(size))
    if handing.is_last:
        forward.logits(hidden[: bounds.max_sequences])
