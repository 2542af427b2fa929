"""The batch: sequences in slots, prompts in computation, and what the next step must begin with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.adapters.slots import NO_SLOT, AdapterSlots, Wanted
from engine.bounds import Bounds
from engine.groups.others import OtherGroups, Spares
from engine.hooks.requests import RequestHooks
from engine.pages.blocks import BlockManager
from engine.pages.following import follow
from engine.schedule.sequences import NO_IDS, ActiveRequest, ChunkPlan, PrefillTask, Sequence
from engine.schedule.slots import SlotState, SlotTable
from engine.step.plan import Begins, StepPlan
from engine.step.sampling import SamplePlanner
from engine.stopping import end_ids
from engine.types import PageIds

Int32s = NDArray[np.int32]
NO_TAGS: Int32s = np.zeros((0, 0), np.int32)


class Batch:
    """Who is in which slot. Its columns are in `slots`, the sampler's and the hooks' beside them.

    It does not decide: `Admission` fills it, `Planner` moves it on, and `Requests` empties it.
    """

    def __init__(
        self,
        config: Bounds,
        blocks: BlockManager,
        others: OtherGroups,
        sampler: SamplePlanner,
        hooks: RequestHooks | None,
        *,
        speculates: bool,
    ) -> None:
        self.slots = SlotTable(
            config.max_sequences,
            -(-config.max_context_tokens // config.page_size),
            config.page_size,
            speculates=speculates,
        )
        self.owners: list[Sequence | None] = [None] * config.max_sequences
        """The sequence in each slot."""
        self.prefills: list[PrefillTask] = []
        """Tasks with tokens left to launch, in order of admission."""
        self.chunks: dict[int, tuple[ChunkPlan, ...]] = {}
        """The prefill rows of each step in flight that has some, by the step's number."""
        self.next_step = 0
        """Number of the step that is planned next."""
        self.sampler = sampler
        self.others = others
        """The pages of the other groups, by slot."""
        self.adapters = AdapterSlots(config.max_adapters)
        """Adapters that the device has."""
        self._config = config
        self._blocks = blocks
        self._hooks = hooks
        self._copies: dict[int, int] = {}
        """Target page -> source page, for the next step."""
        self._writes: dict[int, int] = {}
        """Slot -> token for the token table, for the next step."""
        self._begins: dict[int, Sequence] | None = {} if speculates else None
        """Sequences that the device's tables do not have yet, by slot; None: there are none."""

    def enter(self, sequence: Sequence, state: SlotState) -> None:
        """Gives a sequence a slot. The caller must set its pages."""
        active = sequence.active
        request = active.request
        slot = self.slots.take(
            state, len(request.prompt_ids), sequence.outputs, request.stop, active.seniority
        )
        if not request.mode.decodes:
            self.slots.set_limit(slot, len(request.prompt_ids))
        self.slots.choice[slot] = sequence.choice
        self.slots.noise_choice[slot] = sequence.noise_choice
        self.slots.request_id[slot], self.slots.sink[slot] = request.id, active.sink
        self.slots.set_stop_ids(slot, sorted(end_ids(request.stop, self._config.eos_token_ids)))
        self.slots.is_masked[slot] = sequence.matcher is not None
        self.slots.adapter[slot] = active.adapter_slot
        self.slots.set_chosen(slot, chosen=request.beams is not None)
        sequence.slot, sequence.drafts = slot, []
        self.owners[slot] = sequence
        if self._begins is not None and request.mode.decodes:
            self._begins[slot] = sequence
            self.slots.drafts[slot] = request.speculates and not any(active.hooked.tags)
        if self._hooks is not None:
            self._hooks.entered(slot, active.hooked)
        self._assign_sampler(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of its slot. The caller has handled its pages."""
        slot = sequence.slot
        sequence.drafted += int(self.slots.drafted[slot])
        sequence.accepted += int(self.slots.accepted[slot])
        self.slots.give_back(slot)
        self.owners[slot] = None
        self._writes.pop(slot, None)
        if self._begins:
            self._begins.pop(slot, None)
        sequence.slot = -1
        if self.prefills:
            self.prefills = [t for t in self.prefills if t.leader is not sequence]

    def write(self, sequence: Sequence, token_id: int) -> None:
        """The token that only the host knows goes into the token table with the next step. It is
        in the column of outputs already."""
        self._assign_sampler(sequence)
        self._writes[sequence.slot] = token_id

    def is_written(self, slot: int) -> None:
        """The device has the token that `write` has left for it."""
        self._writes.pop(slot, None)

    def _assign_sampler(self, sequence: Sequence) -> None:
        request, slot = sequence.active.request, sequence.slot
        self.sampler.assign(
            slot,
            request.sampling,
            request.stop,
            sequence.noise_choice,
            request.prompt_ids,
            self.slots.output_ids(slot),
        )

    def owner(self, slot: int) -> Sequence:
        """The sequence in a slot that has one."""
        owner = self.owners[slot]
        assert owner is not None, "a live row has an owner"
        return owner

    def owner_of_row(self, plan: StepPlan, row: int) -> Sequence | None:
        """The sequence of a sampled row, if it is still in its slot."""
        slot = int(plan.sample_slots[row])
        alive = self.slots.generation[slot] == plan.sample_generations[row]
        return self.owners[slot] if alive else None

    def alive(self, plan: StepPlan) -> NDArray[np.bool_]:
        """[S]: sampled rows whose sequence is still in its slot."""
        current = self.slots.generation[plan.sample_slots]
        return np.asarray(current == plan.sample_generations, np.bool_)

    def runs(self, task: PrefillTask) -> bool:
        """Whether the task's leader has stayed in the task's slot."""
        in_slot = task.leader.slot == task.slot
        return in_slot and int(self.slots.generation[task.slot]) == task.generation

    def live_chunks(self, number: int) -> list[ChunkPlan]:
        """The prefill rows of a step in flight whose tasks still run."""
        return [chunk for chunk in self.chunks.get(number, ()) if self.runs(chunk.task)]

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are admitted and not launched."""
        return sum(task.remaining for task in self.prefills)

    def has_adapter_slot(self, active: ActiveRequest) -> bool:
        """Whether the device has a slot for a request's adapter. If not, the request waits for
        one."""
        if self.adapters.has_room(active.adapter):
            return True
        active.slot_wanted_s = active.slot_wanted_s or self.adapters.waits.began()
        return False

    def take_adapter(self, active: ActiveRequest) -> None:
        """A request is admitted: the device has its adapter from the next step on."""
        if active.adapter_slot == NO_SLOT and active.adapter is not None:
            active.adapter_slot = self.adapters.take(active.adapter)
            if active.slot_wanted_s:
                self.adapters.waits.ended(active.slot_wanted_s)
                active.slot_wanted_s = 0.0

    def give_adapter_back(self, active: ActiveRequest) -> None:
        """Nothing of a request will be planned any more."""
        if active.adapter_slot != NO_SLOT and active.adapter is not None:
            self.adapters.give_back(active.adapter)
            active.adapter_slot = NO_SLOT

    def adapter_rows(self, row_slots: Int32s) -> tuple[Int32s, Wanted]:
        """[R]: the slot of each row's adapter (empty: no row has one), and what is there."""
        found = self.slots.adapter[row_slots]
        if not (found != NO_SLOT).any():
            return NO_IDS, ()
        return found, self.adapters.wanted(found)

    def hook_tags(self, row_slots: Int32s) -> Int32s:
        """[H, R]: what each hook has to do with each row."""
        return NO_TAGS if self._hooks is None else self._hooks.tags[:, row_slots]

    def fork(self, sequences: list[Sequence]) -> None:
        """Lets every sequence run from the leader's KV, which is computed or will be by the step
        just planned. Full pages are shared. The partial page is copied before the next step."""
        leader, *followers = sequences
        active = leader.active
        self.slots.state[leader.slot] = SlotState.RUNNING
        for i, follower in enumerate(followers):
            self._follow(leader, follower, active.spare_pages, active.other_spares, i)
            self.slots.state[follower.slot] = SlotState.RUNNING
        if followers and self._has_partial_page(leader):
            active.spare_pages, active.other_spares = NO_IDS, ()

    def _has_partial_page(self, sequence: Sequence) -> bool:
        return int(self.slots.kv_len[sequence.slot]) % self._config.page_size != 0

    def _follow(
        self,
        leader: Sequence,
        follower: Sequence,
        spare_pages: PageIds,
        other_spares: Spares,
        at: int,
    ) -> None:
        """The follower, which has no pages, gets the leader's. `at`: the place of its spares."""
        length, partial = int(self.slots.kv_len[leader.slot]), self._has_partial_page(leader)
        # The leader may have pages ahead of its tokens, which stay its own.
        pages = self.slots.pages(leader.slot)[: -(-length // self._config.page_size)]
        own = pages.copy()
        if partial:
            own[-1] = spare_pages[at]
            self._copies[int(own[-1])] = int(pages[-1])
            self._blocks.arrivals.copied(int(pages[-1]), int(own[-1]))
            # The source page counts as well: its sequence may end before that step has run, and no
            # other sequence may get the page until then.
            copied = np.array([own[-1], pages[-1]], np.int32)
            self._blocks.mark_written(copied, self.next_step)
        self._blocks.share(pages[: len(pages) - partial])
        self.slots.set_pages(follower.slot, own)
        self.slots.set_kv(follower.slot, length)
        spares = other_spares if partial else ()
        self.others.fork(leader.slot, follower.slot, length, spares, at, self.next_step)

    # -- chosen sequences ---------------------------------------------------------------------

    def follow(self, sequences: list[Sequence], parents: list[int], tokens: list[int]) -> None:
        """A step of some sequences has settled. Sequence i goes on behind the tokens of
        `sequences[parents[i]]`, with `tokens[i]`, in its own slot."""
        slots = self.slots
        own = np.array([one.slot for one in sequences])
        those, count = own[parents], int(slots.output_len[own[0]])
        slots.outputs[own, :count] = slots.outputs[those, :count]
        slots.outputs[own, count] = tokens
        slots.output_len[own] = count + 1
        full = int(slots.settled_kv(own)[0]) // self._config.page_size
        follow(self._blocks, slots.page_table[:, :full], own, those)
        self.others.follow(own, those, full)

    def write_last(self, sequences: list[Sequence]) -> None:
        """The last tokens of these go into the token table with the next step."""
        for one in sequences:
            last = self.slots.output_len[one.slot] - 1
            self._writes[one.slot] = int(self.slots.outputs[one.slot, last])

    def take_transfers(self) -> tuple[dict[int, int], dict[int, int], Begins | None]:
        """Takes the page copies and table writes with which the next step must begin."""
        queued = self._copies, self._writes, self._take_begins()
        self._copies, self._writes = {}, {}
        return queued

    def begin_again(self, begins: Begins) -> set[int]:
        """The step that had these has failed: the next one has them, too. Returns the slots of
        sequences that decode already, for which that is too late."""
        late = set()
        for slot in begins.slots.tolist():
            if (owner := self.owners[slot]) is None or self._begins is None:
                continue
            if self.slots.state[slot] in (SlotState.RESERVED, SlotState.PREFILLING):
                self._begins[slot] = owner
            else:
                late.add(slot)
        return late

    def _take_begins(self) -> Begins | None:
        if not self._begins:
            return None
        begun, self._begins = list(self._begins.values()), {}
        sampling = [one.active.request.sampling for one in begun]
        return Begins(
            slots=np.array([one.slot for one in begun], np.int32),
            lens=np.array([len(one.tokens) for one in begun], np.int32),
            prompt_lens=np.array([len(one.active.request.prompt_ids) for one in begun], np.int32),
            choices=np.array([one.noise_choice for one in begun], np.int32),
            seeds=np.array([one.seed for one in sampling], np.uint64).view(np.int64),
            ids=np.concatenate([one.tokens for one in begun]).astype(np.int32),
        )

    @property
    def has_transfers(self) -> bool:
        """Whether copies or writes wait for a step."""
        return bool(self._copies or self._writes or self.others.has_copies)
