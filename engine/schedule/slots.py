"""Columns by slot: the state of every running sequence, in arrays for the step loop.

A sequence is in a slot from its admission until it ends or is preempted. For each slot in use:

    0 <= kv_low <= kv_len <= page_count * page_size
    positions [0, kv_low) are stored; never written again
    positions [kv_low, kv_len) may be written by launched steps
    output index i is drawn from the logits at position prompt_len + i - 1
    least_kv + 1 < limit_len  iff  one more decode step is wanted

Without drafts a step adds one token to each row, so least_kv is kv_len, and the columns that bound
it are not kept. With them (`engine.speculation`) the host knows bounds while a step is in flight.
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from engine.adapters.slots import NO_SLOT
from engine.types import PageIds, StopRules, TokenIds

Rows = NDArray[np.intp]
NO_TOKEN = -1
FEW_STOP_IDS = 4
"""Columns for stop ids that always exist."""


class SlotState(enum.IntEnum):
    """The state of the sequence in a slot."""

    EMPTY = 0
    RESERVED = 1
    """RECEIVE: pages are granted, and the KV is still to come."""
    PREFILLING = 2
    RUNNING = 3
    PREEMPTING = 4
    """It is out of the batch. Its pages are freed when its last launched step has settled."""


class SlotTable:
    """Columns over `max_slots` slots. Written by the step loop's thread only."""

    def __init__(
        self,
        max_slots: int,
        max_pages_per_sequence: int,
        page_size: int,
        *,
        speculates: bool = False,
    ) -> None:
        self.max_slots = max_slots
        self.page_size = page_size
        self.speculates = speculates
        """Whether a step may add other than one token to a row."""
        self.state = np.zeros(max_slots, np.int8)
        self.generation = np.zeros(max_slots, np.int32)
        self.choice = np.zeros(max_slots, np.int32)
        """Index of the choice in the request."""
        self.noise_choice = np.zeros(max_slots, np.int32)
        """Index of the choice for the noise."""
        self.request_id = np.empty(max_slots, np.object_)
        self.sink = np.empty(max_slots, np.object_)
        """Sink of the sequence. The scheduler sets it, and the request's id and choice."""
        self.prompt_len = np.zeros(max_slots, np.int32)
        self.limit_len = np.zeros(max_slots, np.int32)
        """Length of prompt and output when `max_tokens` is reached. A PREFILL request counts no
        output."""
        self.final_pages = np.zeros(max_slots, np.int32)
        """Pages of so many tokens; 0 in an empty slot."""
        self.min_tokens = np.zeros(max_slots, np.int32)
        self.kv_len = np.zeros(max_slots, np.int32)
        """Tokens in KV after all launched steps: the most."""
        self.kv_low = np.zeros(max_slots, np.int32)
        """Tokens in KV after all settled steps, if drafts are verified. See `settled_kv`."""
        self.flying = np.zeros(max_slots, np.int32)
        """Decode steps in flight, if drafts are verified: at most two."""
        self.drafts = np.zeros(max_slots, np.bool_)
        """Whether drafts of the sequence may be verified. The scheduler sets it."""
        self.drafted = np.zeros(max_slots, np.int32)
        """Drafts verified for the sequence, in this slot."""
        self.accepted = np.zeros(max_slots, np.int32)
        self._bound = np.zeros(max_slots, np.int32)
        self._width = np.zeros(max_slots, np.int32)
        self.output_len = np.zeros(max_slots, np.int32)
        """Number of output tokens that the host has read."""
        self.in_flight = np.zeros(max_slots, np.int32)
        """Number of launched, unsettled steps that draw a token for the slot."""
        self.seniority = np.zeros(max_slots, np.int64)
        """Admission order of the request, kept through preemption. Lower is older."""
        self.page_count = np.zeros(max_slots, np.int32)
        self.page_table = np.zeros((max_slots, max_pages_per_sequence), np.int32)
        self.stop_ids = np.full((max_slots, FEW_STOP_IDS), NO_TOKEN, np.int32)
        """Ids that end the sequence, with end of sequence, padded."""
        self._stop_counts = np.zeros(max_slots, np.int32)
        self.is_chosen = np.zeros(max_slots, np.bool_)
        """Whether a chooser says how the sequence goes on. See `set_chosen`."""
        self.num_chosen = 0
        self.adapter = np.full(max_slots, NO_SLOT, np.int32)
        """Slot of the sequence's adapter on the device. The scheduler sets it."""
        self.is_masked = np.zeros(max_slots, np.bool_)
        """Whether the sequence may draw only some tokens. The scheduler sets it."""
        self.outputs = np.zeros((max_slots, 256), np.int32)
        self._free = list(range(max_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that no sequence holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that a sequence holds."""
        return self.max_slots - len(self._free)

    def take(
        self, state: SlotState, prompt_len: int, outputs: TokenIds, stop: StopRules, seniority: int
    ) -> int:
        """Gives a sequence a slot. `outputs` are its earlier generated tokens."""
        slot = self._free.pop()
        self.state[slot] = state
        self.prompt_len[slot] = prompt_len
        self.set_limit(slot, prompt_len + stop.max_tokens)
        self.min_tokens[slot] = stop.min_tokens
        self.set_kv(slot, 0)
        self.drafts[slot] = False
        self.drafted[slot] = self.accepted[slot] = 0
        self.in_flight[slot] = 0
        self.seniority[slot] = seniority
        self.page_count[slot] = 0
        self._reserve_outputs(stop.max_tokens)
        self.outputs[slot, : len(outputs)] = outputs
        self.output_len[slot] = len(outputs)
        return slot

    def set_limit(self, slot: int, length: int) -> None:
        """Sets `limit_len` of the sequence in `slot`."""
        self.limit_len[slot] = length
        self.final_pages[slot] = -(-length // self.page_size)

    def set_kv(self, slot: int, length: int) -> None:
        """Sets the tokens in KV of a sequence that does not decode yet."""
        self.kv_len[slot] = self.kv_low[slot] = length
        self.flying[slot] = 0

    def least_kv(self, rows: Rows) -> NDArray[np.int32]:
        """[R]: the fewest tokens in KV after all launched steps. Each adds one, unless there is no
        place for it."""
        if not self.speculates:
            return self.kv_len[rows]
        least: NDArray[np.int32] = np.minimum(
            self.kv_low[rows] + self.flying[rows], self.kv_len[rows]
        )
        return least

    def settled_kv(self, rows: Rows | NDArray[np.int32]) -> NDArray[np.int32]:
        """[R]: the tokens in KV after all settled steps, of rows whose prompts have settled."""
        if self.speculates:
            return self.kv_low[rows]
        settled: NDArray[np.int32] = self.kv_len[rows] - self.in_flight[rows]
        return settled

    def launch(self, rows: Rows, bounds: NDArray[np.int32], width: int) -> None:
        """A decode step of these rows is launched.

        Args:
            rows: [R] slots.
            bounds: [R], the first position that the step does not store.
            width: tokens of each row.
        """
        self.kv_len[rows] = bounds
        if not self.speculates:
            return
        self._bound[rows] = bounds
        self._width[rows] = width
        self.flying[rows] += 1

    def land(self, rows: Rows, counts: NDArray[np.int32] | int) -> None:
        """The oldest decode step in flight of these rows has added `counts` tokens."""
        self.kv_low[rows] += counts
        self.flying[rows] -= 1
        most = np.minimum(self._bound[rows], self.kv_low[rows] + self._width[rows])
        self.kv_len[rows] = np.where(self.flying[rows] > 0, most, self.kv_low[rows])

    def set_stop_ids(self, slot: int, ids: list[int]) -> None:
        """Sets the ids that end the sequence in `slot`. There are only as many columns as the
        sequences need, because every step reads all of them."""
        self._stop_counts[slot] = len(ids)
        width, was = max(FEW_STOP_IDS, int(self._stop_counts.max())), self.stop_ids.shape[1]
        if width != was:
            fitted = np.full((self.max_slots, width), NO_TOKEN, np.int32)
            fitted[:, :was] = self.stop_ids[:, :width]
            self.stop_ids = fitted
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(ids)] = ids

    def set_chosen(self, slot: int, *, chosen: bool) -> None:
        """Whether a chooser says how the sequence in `slot` goes on."""
        self.num_chosen += int(chosen) - int(self.is_chosen[slot])
        self.is_chosen[slot] = chosen

    def give_back(self, slot: int) -> None:
        """Empties a slot whose pages were handled. Its generation changes, so that steps in flight
        for the old sequence do not count for the next one."""
        assert self.state[slot] != SlotState.EMPTY
        self.state[slot] = SlotState.EMPTY
        self.generation[slot] += 1
        self.page_count[slot] = self.final_pages[slot] = 0
        self._stop_counts[slot] = 0
        self.set_chosen(slot, chosen=False)
        self._free.append(slot)

    def pages(self, slot: int) -> PageIds:
        """The pages of the sequence in `slot`, in order."""
        return self.page_table[slot, : self.page_count[slot]].copy()

    def set_pages(self, slot: int, pages: PageIds) -> None:
        """Replaces the pages of the sequence in `slot`."""
        self.page_table[slot, : len(pages)] = pages
        self.page_count[slot] = len(pages)

    def output_ids(self, slot: int) -> TokenIds:
        """Output tokens read so far."""
        return self.outputs[slot, : self.output_len[slot]].copy()

    def running(self) -> NDArray[np.intp]:
        """Slots in the batch, in slot order."""
        return np.flatnonzero(self.state == SlotState.RUNNING)

    def count_in_flight(self, drawn: NDArray[np.int32], step: int) -> None:
        """Adds `step` (1 or -1) to the steps in flight of each slot, for each token drawn."""
        self.in_flight += step * np.bincount(drawn, minlength=self.max_slots)

    def growth(self) -> NDArray[np.int32]:
        """Pages that the sequence in each slot may still ask for; 0 for an empty slot. Every load
        report asks for it, several times a step."""
        growth: NDArray[np.int32] = np.maximum(self.final_pages - self.page_count, 0)
        return growth

    def _reserve_outputs(self, max_tokens: int) -> None:
        width = self.outputs.shape[1]
        if max_tokens > width:
            wider = np.zeros((self.max_slots, max(max_tokens, 2 * width)), np.int32)
            wider[:, :width] = self.outputs
            self.outputs = wider
