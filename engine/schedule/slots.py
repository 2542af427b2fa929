"""Slot-indexed columns: the state of every running sequence, in arrays the step loop can sweep.

A sequence is in a slot from its admission until it ends or is preempted. For each slot in use:

    0 <= kv_len <= page_count * page_size
    positions [0, kv_len) are stored, or will be by launched steps; never written twice
    output index i is drawn from the logits at position prompt_len + i - 1
    kv_len + 1 < limit_len  iff  one more decode step is wanted
"""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from engine.types import PageIds, StopRules, TokenIds

NO_TOKEN = -1
FEW_STOP_IDS = 4
"""Columns that are always there."""


class SlotState(enum.IntEnum):
    """Where the sequence in a slot stands."""

    EMPTY = 0
    RESERVED = 1
    """RECEIVE: pages are granted, the KV is on its way."""
    PREFILLING = 2
    RUNNING = 3
    PREEMPTING = 4
    """Out of the batch; its pages go once its last launched step has settled."""


class SlotTable:
    """Columns over `max_slots` slots. Written by the step loop's thread only."""

    def __init__(self, max_slots: int, max_pages_per_sequence: int, page_size: int) -> None:
        self.max_slots = max_slots
        self.page_size = page_size
        self.state = np.zeros(max_slots, np.int8)
        self.generation = np.zeros(max_slots, np.int32)
        self.choice = np.zeros(max_slots, np.int32)
        """As the request counts them."""
        self.noise_choice = np.zeros(max_slots, np.int32)
        """As the noise does."""
        self.request_id = np.empty(max_slots, np.object_)
        self.sink = np.empty(max_slots, np.object_)
        """Who is told of the sequence; set by the scheduler, as the request's id and choice."""
        self.prompt_len = np.zeros(max_slots, np.int32)
        self.limit_len = np.zeros(max_slots, np.int32)
        """Prompt and output together when `max_tokens` is reached; PREFILL: no output."""
        self.min_tokens = np.zeros(max_slots, np.int32)
        self.kv_len = np.zeros(max_slots, np.int32)
        self.output_len = np.zeros(max_slots, np.int32)
        """Output tokens that the host has read."""
        self.in_flight = np.zeros(max_slots, np.int32)
        """Launched steps, not settled, that draw a token for the slot."""
        self.seniority = np.zeros(max_slots, np.int64)
        """Lower is older: admission order of the request, kept through preemption."""
        self.page_count = np.zeros(max_slots, np.int32)
        self.page_table = np.zeros((max_slots, max_pages_per_sequence), np.int32)
        self.stop_ids = np.full((max_slots, FEW_STOP_IDS), NO_TOKEN, np.int32)
        """Ids that end the sequence, end of sequence included, padded."""
        self._stop_counts = np.zeros(max_slots, np.int32)
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
        """Gives a sequence a slot. `outputs` are the tokens it has generated before."""
        slot = self._free.pop()
        self.state[slot] = state
        self.prompt_len[slot] = prompt_len
        self.limit_len[slot] = prompt_len + stop.max_tokens
        self.min_tokens[slot] = stop.min_tokens
        self.kv_len[slot] = 0
        self.in_flight[slot] = 0
        self.seniority[slot] = seniority
        self.page_count[slot] = 0
        self._reserve_outputs(stop.max_tokens)
        self.outputs[slot, : len(outputs)] = outputs
        self.output_len[slot] = len(outputs)
        return slot

    def set_stop_ids(self, slot: int, ids: list[int]) -> None:
        """Which ids end the sequence in `slot`. There are as many columns as some sequence needs:
        every step looks at all of them."""
        self._stop_counts[slot] = len(ids)
        width, was = max(FEW_STOP_IDS, int(self._stop_counts.max())), self.stop_ids.shape[1]
        if width != was:
            fitted = np.full((self.max_slots, width), NO_TOKEN, np.int32)
            fitted[:, :was] = self.stop_ids[:, :width]
            self.stop_ids = fitted
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(ids)] = ids

    def give_back(self, slot: int) -> None:
        """Empties a slot whose pages have been taken care of. Its generation moves on, so steps
        in flight that still name it are not mistaken for the next sequence's."""
        assert self.state[slot] != SlotState.EMPTY
        self.state[slot] = SlotState.EMPTY
        self.generation[slot] += 1
        self.page_count[slot] = 0
        self._stop_counts[slot] = 0
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
        """One step more (1) or fewer (-1) in flight per token drawn for a slot."""
        self.in_flight += step * np.bincount(drawn, minlength=self.max_slots)

    def growth(self) -> NDArray[np.int32]:
        """Pages that each sequence in a slot may still ask for."""
        used = np.flatnonzero(self.state != SlotState.EMPTY)
        final = -(-self.limit_len[used] // self.page_size)
        return np.asarray(np.maximum(final - self.page_count[used], 0), np.int32)

    def _reserve_outputs(self, max_tokens: int) -> None:
        width = self.outputs.shape[1]
        if max_tokens > width:
            wider = np.zeros((self.max_slots, max(max_tokens, 2 * width)), np.int32)
            wider[:, :width] = self.outputs
            self.outputs = wider
