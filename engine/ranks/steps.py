"""Steps on their way to the other ranks: raw integers, no pickle.

A step is a list of frames: `HEAD`, then the columns of `StepPlan` that a rank needs, then the next
ids of each prompt that is scored, then the columns of each group beyond group 0, then those of each
search. All are int32 in the order of the host, which is the same for all ranks. What only rank 0
needs, such as sampling options and masks, stays there.

A step names slots of adapters alone. Before the first step that wants one in a slot, rank 0 says
where its memory lies (`engine.adapters.shared`). To each other host it sends that memory once, in
pieces: the first rank there leaves a note in the host's folder, and the others read where it lies.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.adapters.shared import SharedFile, mapped, opened
from engine.adapters.slots import NO_SLOT
from engine.adapters.types import Adapter, AdapterError
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
_LOOK_S: Final = 0.001
"""A rank looks this often for a note."""
_NOTE_S: Final = 60.0
"""It is there within so many seconds, or the first rank of the host is not well."""

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


class Told(NamedTuple):
    """A message, as each rank hears it."""

    here: Message
    """A rank of rank 0's host."""
    first: Message
    """The first rank of another host. Of an adapter it has the memory itself, not a copy."""
    further: Message
    """Any other rank of another host."""


class StepMessages:
    """What rank 0 sends for its steps."""

    def __init__(self) -> None:
        self._sent: dict[int, bytes] = {}
        """Digests by slot."""
        self._notes = count()
        self._kept: deque[list[Adapter]] = deque(maxlen=_KEPT_STEPS)

    def of(self, plan: StepPlan) -> Iterator[Told]:
        """The messages of a step, in order."""
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
            note = [*told, f"adapter-{next(self._notes)}".encode()]
            memory = memoryview(each.file.memory)
            firsts = range(0, len(memory), _PIECE_BYTES)
            pieces = [memory[first : first + _PIECE_BYTES] for first in firsts]
            yield Told([*told, each.file.path.encode()], [*note, *pieces], note)
        step: Message = [STEP, *encode(plan)]
        yield Told(step, step, step)


class RankAdapters:
    """What another rank has heard.

    Args:
        folder: the private folder of its host.
    """

    def __init__(self, folder: Path) -> None:
        self._by_slot: dict[int, Adapter] = {}
        self._folder = folder
        self._new: list[tuple[Path, SharedFile]] = []
        self._kept: deque[list[tuple[Path, SharedFile]]] = deque()
        """What the first rank of a host has noted for others, by step, as rank 0 keeps its own."""

    def put(self, frames: Sequence[bytes]) -> None:
        """Takes what rank 0 said of a slot.

        Raises:
            AdapterError, OSError: the memory is not there.
        """
        slot, digest, where, *pieces = frames
        if pieces:
            found = opened(self._received(where.decode(), pieces).memory)
        elif where.startswith(b"/"):
            found = mapped(where.decode(), digest)
        else:
            found = mapped(self._noted(where.decode()), digest)
        self._by_slot[int(slot)] = found

    def _received(self, note: str, pieces: Sequence[bytes]) -> SharedFile:
        file, at = SharedFile(sum(map(len, pieces))), 0
        for piece in pieces:
            file.memory[at : at + len(piece)] = piece
            at += len(piece)
        written, path = self._folder / f"{note}.new", self._folder / note
        written.write_text(file.path)
        written.rename(path)
        self._new.append((path, file))
        return file

    def _noted(self, note: str) -> str:
        ends_s = time.monotonic() + _NOTE_S
        while not (path := self._folder / note).exists():
            if time.monotonic() > ends_s:
                raise AdapterError("the first rank of this host has got no memory of an adapter")
            time.sleep(_LOOK_S)
        return path.read_text()

    def completed(self, plan: StepPlan) -> StepPlan:
        """A step with what its slots must have."""
        self._kept.append(self._new)
        self._new = []
        if len(self._kept) > _KEPT_STEPS:
            for path, _ in self._kept.popleft():
                path.unlink()
        found = np.unique(plan.adapters[plan.adapters != NO_SLOT]).tolist()
        wanted = tuple((slot, self._by_slot[slot]) for slot in found)
        return replace(plan, adapters_wanted=wanted)
