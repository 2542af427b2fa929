"""Admission of requests to slots and pages.

Pages under a transfer cannot be preempted. So a request is admitted only if the remaining pages
cover every earlier promise:

    pages(prompt) + growth <= free + evictable - max(reserve, largest single need)

The largest single need is the most pages that one sequence in a slot may still need. All others are
preempted in its favour, so one sequence always reaches its end. The reserve is for the growth of
all of them (`Admission.growth_reserve`).

Preempted sequences come first, oldest first, and no new request is admitted while one waits. Then
come requests that were begun on another worker, whose client has tokens already. Then come new ones
in the order of the policy. Smaller requests may pass one that does not fit, a bounded number of
times.

A request whose adapter finds no slot (`engine.adapters.slots`) holds up nobody: it does not wait
for pages. But requests with other adapters keep the slots busy, so they may pass it as often and no
more, until it is admitted. Those without an adapter go on.

A prompt to be computed here is admitted when the next step may begin it, and not before. Earlier
pages would be empty, and a waiting prompt may still find more of its pages in the prefix cache.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from engine.bounds import Bounds
from engine.pages.blocks import BlockManager
from engine.pages.prefix import prompt_keys
from engine.schedule.batch import Batch
from engine.schedule.policies import SchedulingPolicy
from engine.schedule.requests import Requests
from engine.schedule.sequences import ActiveRequest, PrefillTask, RequestState, Sequence
from engine.schedule.slots import SlotState
from engine.step.budget import StepBudget
from engine.tiers.peers import Fetches
from engine.tiers.protocol import PageTiers, Wait
from engine.types import Mode, Request, Reserved, TakenOver

EARLY_LOADS = 8
"""So many of the next requests may load pages from lower tiers before it is their turn."""
IN_SLOTS = (RequestState.ACTIVE, RequestState.RESERVED)


class Admission:
    """Gives slots and pages to requests, and counts the tokens that need not be computed.

    It takes requests out of `Requests.waiting` and `Requests.preempted`, and puts them into the
    batch.
    """

    def __init__(
        self,
        config: Bounds,
        blocks: BlockManager,
        batch: Batch,
        requests: Requests,
        budget: StepBudget,
        *,
        policy: SchedulingPolicy,
        tiers: PageTiers,
        fetches: Fetches,
    ) -> None:
        self.cached_tokens = 0
        """Prompt tokens that were found in the pool, since the start."""
        self.unresumable_tokens = 0
        """Prompt tokens that group 0 had, and behind which a prompt could not go on."""
        self.loaded_tokens: Counter[str] = Counter()
        """Cached tokens that came from beyond the pool, by source."""
        self._config = config
        self._blocks = blocks
        self._batch = batch
        self._requests = requests
        self._budget = budget
        self._policy = policy
        self._tiers = tiers
        self._fetches = fetches

    def admit(self) -> None:
        """Gives slots and pages to the requests that may have them, preempted sequences first."""
        self._tiers.turn()
        self._fetches.turn()
        while self._requests.preempted and self._readmit(min(self._requests.preempted, key=_age)):
            pass
        if (
            self._requests.preempted
            or not self._requests.waiting
            or self._batch.slots.num_free == 0
        ):
            return
        in_slots = [active for active in self._requests.by_id.values() if active.state in IN_SLOTS]
        prepared = [active for active in self._requests.waiting if self._is_prepared(active)]
        ordered = self._policy.order(prepared, in_slots)
        ordered = sorted(ordered, key=lambda active: not active.request.generated)
        if self._tiers.on or self._fetches.on:
            ordered = self._without_loading(ordered)
        for active in ordered[:EARLY_LOADS]:
            self._look_up(active)
        most, holds_adapters = self._config.max_passed_over, False
        for active in ordered:
            if holds_adapters and active.adapter is not None:
                continue
            has_slot = self._batch.has_adapter_slot(active)
            if has_slot and self._try_admit(active):
                self._requests.waiting.remove(active)
                self._policy.admitted(active)
                for older in prepared:
                    if older.seniority < active.seniority:
                        self._note_passed(older, active)
            elif self._batch.slots.num_free == 0 or (has_slot and active.passed_over >= most):
                break
            elif active.slot_passed_over >= most:
                holds_adapters = True

    def _note_passed(self, older: ActiveRequest, active: ActiveRequest) -> None:
        """A request was admitted before an older one."""
        if self._batch.adapters.has_room(older.adapter):
            older.passed_over += 1
        elif active.adapter is not None:
            older.slot_passed_over += 1

    def _is_prepared(self, active: ActiveRequest) -> bool:
        """Whether a waiting request may be admitted. A request whose pages have come waits again,
        and counts as cached what has come, which may be less than it waited for."""
        if active.state is RequestState.LOADING and active.wait and active.wait.is_over:
            active.state = RequestState.WAITING
            active.cached_tokens = self._resumable(active.keys) * self._config.page_size
        return active.state is RequestState.WAITING and active.is_prepared

    def _look_up(self, active: ActiveRequest) -> None:
        """Notes once how much of a prompt need not be computed, so that the load report counts only
        the rest, even while there is no room for it."""
        if active.keys or active.request.mode is Mode.RECEIVE:
            return
        active.keys = prompt_keys(self._config, active.request, active.tokens)
        active.cached_tokens = self._resumable(active.keys) * self._config.page_size

    def _resumable(self, keys: list[bytes]) -> int:
        """Leading pages behind which a prompt can be computed: group 0 has them all, and the other
        groups what they need of them."""
        return self._batch.others.resumable(keys, self._blocks.count_cached(keys))

    def _have_others_room(self, request: Request, sequences: int) -> bool:
        """Whether the other groups have pages for sequences of a request."""
        _, final_pages = self._config.extent_of(request)
        final = self._batch.slots.final_pages
        return self._batch.others.has_room(sequences, final_pages, final)

    def growth_reserve(self, wanted: int) -> int:
        """Pages to keep back for the growth of sequences in slots, if `wanted` more pages are given
        out.

            max(pages each * used slots, share * all they may ask for)
            share = (use - watermark) / (1 - watermark), at least 0; use counts the wanted pages

        Up to the watermark one page for each is enough. Most sequences end before `max_tokens`.
        Empty pages for the rare long ones would make the batch smaller. In a fuller pool the next
        sequence is more likely to cause a preemption, which loses computed KV. So the reserve grows
        from the watermark on, and in a full pool it is all that running sequences may still ask
        for. An empty batch has no reserve, so a request that fits the pool is admitted in the end.
        """
        config, blocks = self._config, self._blocks
        least = config.reserve_pages * self._batch.slots.num_used
        use = 1 - (blocks.available - wanted) / blocks.total
        if use <= config.page_watermark or config.page_watermark >= 1:
            return least
        share = (use - config.page_watermark) / (1 - config.page_watermark)
        return max(least, math.ceil(share * int(self._batch.slots.growth().sum())))

    def grantable_pages(self) -> int:
        """The most pages that a new request could have now, beside what is kept back for others. It
        solves the rule of this module for the pages wanted: above the watermark the reserve grows
        with each of them."""
        if self._requests.preempted:
            return 0
        config, available = self._config, self._blocks.available
        growth = self._batch.slots.growth()
        least = max(config.reserve_pages * self._batch.slots.num_used, int(growth.max(initial=0)))
        room = available - least
        above = self._blocks.total * (1 - config.page_watermark)
        if above > 0:
            slope = int(growth.sum()) / above
            room = min(room, int((available + slope * (available - above)) / (1 + slope)))
        return max(0, room)

    def rooms_for_peers(self, wanted: int) -> list[int]:
        """By group, pages that no request of this worker waits for, if `wanted` pages of group 0
        are to be taken."""
        if self._requests.preempted:
            return [0] * (1 + len(self._batch.others.groups))
        return [self._blocks.available - self._kept_back(wanted), *self._others_room()]

    def _has_prefill_room(self) -> bool:
        """Whether the next step could take more prompt tokens than are admitted."""
        admitted = self._batch.queued_tokens
        return admitted < self._budget.tokens

    def _readmit(self, sequence: Sequence) -> bool:
        if not self._has_prefill_room():
            return False
        tokens = sequence.tokens
        pages = -(-len(tokens) // self._config.page_size)
        wanted = pages
        if sequence.active.request.mode.decodes:
            wanted += self._growth(sequence.active.request, pages)
        reserve = self.growth_reserve(wanted)
        if self._batch.slots.num_free == 0 or wanted > self._blocks.available - reserve:
            return False
        if not self._have_others_room(sequence.active.request, 1):
            return False
        active = sequence.active
        keys = prompt_keys(self._config, active.request, tokens, active.keys)
        if sequence.wait is None:
            sequence.wait = self._begin_load(keys, reserve)
        if sequence.wait is None or not sequence.wait.is_over:
            return False
        self._requests.preempted.remove(sequence)
        self._start_prefill([sequence], tokens, keys)
        return True

    def _try_admit(self, active: ActiveRequest) -> bool:
        request = active.request
        if request.mode is not Mode.RECEIVE and not self._has_prefill_room():
            return False
        num_sequences = request.choices if request.mode.decodes else 1
        tokens = active.tokens
        active.keys = prompt_keys(self._config, request, tokens, active.keys)
        pages = -(-len(tokens) // self._config.page_size)
        spare = num_sequences - 1 if len(tokens) % self._config.page_size else 0
        growth = self._growth(request, pages) if request.mode.decodes else 0
        resumable = self._resumable(active.keys)
        active.cached_tokens = resumable * self._config.page_size
        # What another worker sends need not be sent again, even if nothing could go on from it.
        receives = request.mode is Mode.RECEIVE
        used = active.keys if receives else active.keys[:resumable]
        wanted = pages - self._blocks.count_cached(used) + self._blocks.count_evictable(used)
        wanted += spare + growth * num_sequences
        kept_back = self._kept_back(wanted)
        if (
            num_sequences > self._batch.slots.num_free
            or wanted > self._blocks.available - kept_back
            or not self._have_others_room(request, num_sequences)
            or not self._batch.others.can_reserve(len(tokens) if receives else 0, spare)
        ):
            return False
        if active.wait is None and not self._is_loaded(active, kept_back):
            return False
        self._batch.take_adapter(active)
        active.sequences = [
            Sequence(active, i, active.tokens_of(i), active.matcher_of(i))
            for i in range(num_sequences)
        ]
        if num_sequences > 1 and request.generated:
            self._admit_resumed(active)
            return True
        active.spare_pages = self._blocks.allocate_apart(spare)
        active.other_spares = self._batch.others.allocate_spares(spare)
        if receives and not self._take_over(active, len(tokens), resumable):
            self._reserve(active, tokens)
        else:
            active.state = RequestState.ACTIVE
            self._start_prefill(active.sequences, tokens, active.keys)
        return True

    def _without_loading(self, ordered: list[ActiveRequest]) -> list[ActiveRequest]:
        """The requests that wait for no page. The next few begin to load before it is their
        turn."""
        for active in ordered[:EARLY_LOADS]:
            if active.wait is None:
                self._load_early(active)
        return [active for active in ordered if active.state is not RequestState.LOADING]

    def _load_early(self, active: ActiveRequest) -> None:
        tokens = active.tokens
        pages = -(-len(tokens) // self._config.page_size)
        kept_back = self._kept_back(pages)
        if pages > self._blocks.available - kept_back:
            return
        active.keys = prompt_keys(self._config, active.request, tokens, active.keys)
        self._is_loaded(active, kept_back)

    def _is_loaded(self, active: ActiveRequest, kept_back: int) -> bool:
        """Whether no page of a prompt comes from a lower tier or a peer. Asks for that once."""
        active.wait = self._begin_load(active.keys, kept_back)
        if active.wait is None:
            return False
        if active.request.mode is not Mode.RECEIVE:
            rooms = [self._blocks.available - kept_back, *self._others_room()]
            self._fetches.begin(active.wait, active.request, active.keys, rooms)
        if not active.wait.is_over:
            active.state = RequestState.LOADING
            pages = len(active.wait.pinned) + active.wait.coming_pages
            pages = max(pages, min(len(active.keys), self._fetches.expected_pages(active.wait)))
            active.cached_tokens = pages * self._config.page_size
        return active.wait.is_over

    def _begin_load(self, keys: list[bytes], kept_back: int) -> Wait | None:
        room = self._blocks.available - kept_back
        queued = self._batch.queued_tokens
        return self._tiers.begin(keys, room, queued, self._others_room())

    def _others_room(self) -> list[int]:
        """By other group, pages that are promised to nobody."""
        return self._batch.others.room(self._batch.slots.final_pages)

    def _kept_back(self, wanted: int) -> int:
        """Pages that a new request must leave, if it takes `wanted` pages."""
        largest = int(self._batch.slots.growth().max(initial=0))
        return max(self.growth_reserve(wanted), largest)

    def _take_over(self, active: ActiveRequest, num_tokens: int, cached_pages: int) -> bool:
        """Whether the prompt of a RECEIVE request is computed here. This needs three things: the
        cache allows to begin behind most of it, the rest is short, and the next step may begin the
        rest."""
        held = cached_pages * self._config.page_size
        if num_tokens - held > min(active.request.takeover_tokens, held):
            return False
        if not self._has_prefill_room():
            return False
        self._requests.emit(active.sink, TakenOver(active.request.id, held))
        return True

    def _growth(self, request: Request, pages: int) -> int:
        """Pages that a sequence with `pages` pages will need soon: one, unless it is complete."""
        longest = len(request.prompt_ids) + request.stop.max_tokens
        return min(1, -(-longest // self._config.page_size) - pages)

    def _admit_resumed(self, active: ActiveRequest) -> None:
        """Admits choices that differ already. They are computed one by one, like preempted ones,
        and share only the prompt's keys."""
        del active.keys[len(active.request.prompt_ids) // self._config.page_size :]
        active.state = RequestState.ACTIVE
        self._requests.preempted.extend(active.sequences)

    def _reserve(self, active: ActiveRequest, tokens: NDArray[np.int32]) -> None:
        for sequence in active.sequences:
            self._batch.enter(sequence, SlotState.RESERVED)
        slot = active.sequences[0].slot
        held = self._allocate_prompt(slot, len(tokens), active.keys)
        others = self._batch.others.reserve(slot, len(tokens), active.keys)
        active.state, active.reserved_from = RequestState.RESERVED, held
        pages = self._batch.slots.pages(slot)
        self._requests.emit(active.sink, Reserved(active.request.id, pages, held, others))

    def _start_prefill(
        self, sequences: list[Sequence], tokens: NDArray[np.int32], keys: list[bytes]
    ) -> None:
        for sequence in sequences:
            self._batch.enter(sequence, SlotState.PREFILLING)
        leader = sequences[0]
        known = self._blocks.count_cached(keys)
        used = self._batch.others.resumable(keys, known)
        self.unresumable_tokens += (known - used) * self._config.page_size
        held = self._allocate_prompt(leader.slot, len(tokens), keys[:used])
        self._batch.others.begin(leader.slot, keys, held, known)
        cached = held * self._config.page_size
        loaded = self._loaded_tokens(leader, cached)
        self.cached_tokens += cached
        self.loaded_tokens.update(loaded)
        self._batch.slots.set_kv(leader.slot, cached)
        self._batch.prefills.append(
            PrefillTask(
                leader=leader,
                followers=sequences[1:],
                tokens=tokens,
                keys=keys,
                cursor=cached,
                cached_tokens=cached,
                loaded_tokens=loaded,
                published_pages=held,
                slot=leader.slot,
                generation=int(self._batch.slots.generation[leader.slot]),
            )
        )

    def _loaded_tokens(self, leader: Sequence, cached: int) -> dict[str, int]:
        """Cached tokens that came from lower tiers, by tier."""
        wait, size = leader.wait or leader.active.wait, self._config.page_size
        pages = wait.loaded_pages if wait else {}
        return {tier: min(count * size, cached) for tier, count in pages.items()}

    def _allocate_prompt(self, slot: int, num_tokens: int, keys: list[bytes]) -> int:
        """Gives a slot the cached pages, then fresh ones. Returns the number of cached pages."""
        cached = self._blocks.acquire(keys)
        count = -(-num_tokens // self._config.page_size) - len(cached)
        self._batch.slots.set_pages(slot, np.concatenate([cached, self._blocks.allocate(count)]))
        return len(cached)


def _age(sequence: Sequence) -> tuple[int, int]:
    return (sequence.active.seniority, sequence.choice)
