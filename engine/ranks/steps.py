"""Steps on their way to the other ranks: raw integers, no pickle.

A step is a list of frames: `HEAD`, then the columns of `StepPlan` that a rank needs, then the next
ids of each prompt that is scored, then the columns of each group beyond group 0. All are int32 in
the order of the host, which is the same for all ranks. What only rank 0 needs, such as sampling
options and masks, stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.step.plan import GroupTable, ScorePlan, StepPlan
from engine.step.sampling import SamplePlan

Int32s = NDArray[np.int32]

COLUMNS: Final = (
    "token_ids",
    "positions",
    "row_slots",
    "query_lens",
    "context_lens",
    "page_table",
    "sample_tokens",
    "sample_slots",
    "copy_source",
    "copy_target",
    "write_slots",
    "write_tokens",
    "arrived",
    "hook_terms",
)
"""Columns that travel. The page table and the hooks' terms have two dimensions."""
HEAD: Final = ("number", "num_decodes", "shape", "samples", "whole_logits", "table_width", "hooks")
"""First integers of the first frame. (first token, top N) of each scored prompt follow."""


GROUP: Final = ("pages", "skipped", "copy_source", "copy_target")
"""Columns of `GroupTable`, of which the first has two dimensions."""


def encode(plan: StepPlan) -> list[memoryview]:
    """The frames of a step."""
    head = [plan.number, plan.num_decodes, plan.shape, plan.sample is not None, plan.whole_logits]
    head += [plan.page_table.shape[-1], len(plan.hook_terms)]
    for wanted in plan.scores:
        head += [wanted.first_token, wanted.top_n]
    columns = [getattr(plan, name) for name in COLUMNS]
    arrays = [np.array(head), *columns, *(wanted.next_ids for wanted in plan.scores)]
    arrays += [getattr(other, name) for other in plan.others for name in GROUP]
    return [np.ascontiguousarray(array.reshape(-1), np.int32).data.cast("B") for array in arrays]


def decode(frames: Sequence[bytes]) -> StepPlan:
    """The step of some frames, without what only rank 0 needs."""
    head, *arrays = (np.frombuffer(frame, np.int32) for frame in frames)
    number, num_decodes, shape, samples, whole, width, hooks = map(int, head[: len(HEAD)])
    columns: dict[str, Any] = dict(zip(COLUMNS, arrays, strict=False))
    columns["page_table"] = columns["page_table"].reshape(-1, width)
    columns["hook_terms"] = columns["hook_terms"].reshape(hooks, len(columns["row_slots"]))
    asked = head[len(HEAD) :].reshape(-1, 2).tolist()
    scores = zip(asked, arrays[len(COLUMNS) :], strict=False)
    groups = arrays[len(COLUMNS) + len(asked) :]
    starts = range(0, len(groups), len(GROUP))
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        **columns,
        number=number,
        num_decodes=num_decodes,
        shape=shape,
        sample_generations=nothing,
        sample_indices=nothing,
        sample=SamplePlan(len(columns["sample_slots"])) if samples else None,
        whole_logits=bool(whole),
        scores=tuple(ScorePlan(first, ids, top_n) for (first, top_n), ids in scores),
        others=tuple(_group(groups[at : at + len(GROUP)]) for at in starts),
    )


def _group(arrays: Sequence[Int32s]) -> GroupTable:
    pages, skipped, *copies = arrays
    return GroupTable(pages.reshape(len(skipped), -1), skipped, *copies)
