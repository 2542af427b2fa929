"""Steps on their way to the other ranks: raw integers, no pickle.

A step is a list of frames: `HEAD`, then the columns of `StepPlan` that a rank needs, then the next
ids of each prompt that is scored, then the columns of each group beyond group 0, then those of each
search. All are int32 in the order of the host, which is the same for all ranks. What only rank 0
needs, such as sampling options and masks, stays there.

A step names slots of adapters alone. Before the first step that wants one in a slot, rank 0 says
where its memory lies (`engine.adapters.shared`), or sends it, in pieces, to ranks of other hosts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.adapters.shared import mapped, opened
from engine.adapters.slots import NO_SLOT
from engine.adapters.types import Adapter
from engine.beams.plan import SearchPlan
from engine.ranks.process import ADAPTER, STEP
from engine.step.plan import Begins, GroupTable, ScorePlan, StepPlan
from engine.step.sampling import SamplePlan

Int32s = NDArray[np.int32]
Message = list[bytes | memoryview]
_PIECE_BYTES: Final = 4 << 20
"""A frame has so much of an adapter's memory. It is encrypted whole, which takes some milliseconds;
what goes to other ranks waits so long."""
_KEPT_STEPS: Final = 64
"""More than can be launched and not begun by another rank: till then memory that was named to it
must not end."""

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
    "undrafted",
    "drafted_from",
    "hook_tags",
    "pools",
    "successors",
    "adapters",
)
"""Columns that travel. The page table, the hooks' tags and the pools have two dimensions."""
BEGUN: Final = ("slots", "lens", "prompt_lens", "choices", "seeds", "ids")
"""Columns of `Begins`, which travel behind those, if there are any."""
HEAD: Final = (
    "number",
    "num_decodes",
    "shape",
    "samples",
    "whole_logits",
    "table_width",
    "hooks",
    "width",
    "begins",
    "scores",
    "groups",
)
"""First integers of the first frame. (first token, top N) of each scored prompt follow, and
`SearchPlan.followed` of each search."""


GROUP: Final = ("pages", "skipped", "copy_source", "copy_target")
"""Columns of `GroupTable`, of which the first has two dimensions."""


def encode(plan: StepPlan) -> list[memoryview]:
    """The frames of a step."""
    head = [plan.number, plan.num_decodes, plan.shape, plan.sample is not None, plan.whole_logits]
    head += [plan.page_table.shape[-1], len(plan.hook_tags), plan.width, plan.begins is not None]
    head += [len(plan.scores), len(plan.others)]
    for wanted in plan.scores:
        head += [wanted.first_token, wanted.top_n]
    head += [search.followed for search in plan.searches]
    columns = [getattr(plan, name) for name in COLUMNS]
    if plan.begins is not None:
        columns += [getattr(plan.begins, name).view(np.int32) for name in BEGUN]
    arrays = [np.array(head), *columns, *(wanted.next_ids for wanted in plan.scores)]
    arrays += [getattr(other, name) for other in plan.others for name in GROUP]
    for search in plan.searches:
        arrays += [search.slots, search.rows, *search.moved]
    return [np.ascontiguousarray(array.reshape(-1), np.int32).data.cast("B") for array in arrays]


def decode(frames: Sequence[bytes]) -> StepPlan:
    """The step of some frames, without what only rank 0 needs."""
    head, *arrays = (np.frombuffer(frame, np.int32) for frame in frames)
    numbers: dict[str, int] = dict(zip(HEAD, head.tolist(), strict=False))
    columns: dict[str, Any] = dict(zip(COLUMNS, arrays, strict=False))
    hooks, arrays = numbers["hooks"], arrays[len(COLUMNS) :]
    columns["page_table"] = columns["page_table"].reshape(-1, numbers["table_width"])
    columns["hook_tags"] = columns["hook_tags"].reshape(hooks, len(columns["row_slots"]))
    columns["pools"] = columns["pools"].reshape(-1, 4)
    more, scored, others = head[len(HEAD) :], numbers["scores"], numbers["groups"]
    asked, followed = more[: 2 * scored].reshape(-1, 2).tolist(), more[2 * scored :].tolist()
    begins = None
    if numbers["begins"]:
        begun: dict[str, Any] = dict(zip(BEGUN, arrays, strict=False))
        begins = Begins(**begun | {"seeds": begun["seeds"].view(np.int64)})
        arrays = arrays[len(BEGUN) :]
    scores = zip(asked, arrays, strict=False)
    groups, of_search = arrays[scored:], 3 + others
    searches = groups[others * len(GROUP) :]
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        **columns,
        number=numbers["number"],
        num_decodes=numbers["num_decodes"],
        shape=numbers["shape"],
        sample_generations=nothing,
        sample_indices=np.zeros(len(columns["sample_slots"]), np.int32),
        sample=SamplePlan(len(columns["sample_slots"])) if numbers["samples"] else None,
        whole_logits=bool(numbers["whole_logits"]),
        width=numbers["width"],
        begins=begins,
        scores=tuple(ScorePlan(first, ids, top_n) for (first, top_n), ids in scores),
        others=tuple(_group(groups[at * len(GROUP) :][: len(GROUP)]) for at in range(others)),
        searches=tuple(
            _search(pages, searches[at * of_search :][:of_search])
            for at, pages in enumerate(followed)
        ),
    )


def _search(followed: int, arrays: Sequence[Int32s]) -> SearchPlan:
    slots, rows, *moved = arrays
    nothing = np.zeros(0, np.int32)
    return SearchPlan(slots, nothing, nothing, None, rows, followed, tuple(moved))


def _group(arrays: Sequence[Int32s]) -> GroupTable:
    pages, skipped, *copies = arrays
    rows = len(skipped)  # There are none where a step only copies pages.
    return GroupTable(pages.reshape(rows, pages.size // max(1, rows)), skipped, *copies)


class StepMessages:
    """What rank 0 sends for its steps."""

    def __init__(self) -> None:
        self._sent: dict[int, bytes] = {}
        """Digests by slot."""
        self._kept: deque[list[Adapter]] = deque(maxlen=_KEPT_STEPS)

    def of(self, plan: StepPlan) -> Iterator[tuple[Message, Message]]:
        """The messages of a step, in order: to a rank of this host, and to one of another. That of
        an adapter has its memory, not a copy."""
        new = [
            (slot, each)
            for slot, each in plan.adapters_wanted
            if self._sent.get(slot) != each.digest
        ]
        self._kept.append([each for _, each in new])
        for slot, each in new:
            assert each.file is not None, "ranks share what they read"
            self._sent[slot] = each.digest
            told: Message = [ADAPTER, str(slot).encode(), each.digest]
            memory = memoryview(each.file.memory)
            firsts = range(0, len(memory), _PIECE_BYTES)
            pieces = [memory[first : first + _PIECE_BYTES] for first in firsts]
            yield [*told, each.file.path.encode()], [*told, b"", *pieces]
        step: Message = [STEP, *encode(plan)]
        yield step, step


class RankAdapters:
    """What another rank has heard."""

    def __init__(self) -> None:
        self._by_slot: dict[int, Adapter] = {}

    def put(self, frames: Sequence[bytes]) -> None:
        """Takes what rank 0 said of a slot.

        Raises:
            AdapterError, OSError: the memory is not there.
        """
        slot, digest, path, *pieces = frames
        found = mapped(path.decode(), digest) if path else opened(bytearray().join(pieces))
        self._by_slot[int(slot)] = found

    def completed(self, plan: StepPlan) -> StepPlan:
        """A step with what its slots must have."""
        found = np.unique(plan.adapters[plan.adapters != NO_SLOT]).tolist()
        wanted = tuple((slot, self._by_slot[slot]) for slot in found)
        return replace(plan, adapters_wanted=wanted)
