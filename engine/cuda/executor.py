"""The executor on a GPU. A launch never waits for the device.

A step's life:

1. `launch` packs the plan's integers into pinned memory and queues one copy to the device.
2. A step that fits a shape (`engine.cuda.steps.shapes`) is padded to it and replays its graph. Any
   other step runs its kernels one by one. Its prompts keep the device busy, so the launches cost no
   time, unless the model has experts.
   A step with rows of a hook whose calls no graph can contain fits none. Steps with rows that read
   only the pages that a hook chooses have graphs of their own.
3. Tokens are drawn, put into the token table (which the next step reads, on the device) and
   copied to pinned memory. An event marks the end.
4. A thread waits for the event, reads the pinned memory and completes the step's future.

Invariant: everything that touches the pool, the token table or the packed inputs is queued on one
stream, in the order launched.

Each of several ranks runs every step. Sums are in its kernels and graphs, and its end is in
`engine.cuda.ranks.drawing`. The ranks of a stage capture the same graphs in the same order: what is
captured runs once before, and there each waits for the others. Between stages, hidden states come
before a step's kernels and go behind them (`engine.cuda.steps.handing`), outside of graphs.

The workers of an expert group capture the same graphs in the same order, too, and queue steps in
one order (`engine.cuda.groups`). Only decode rows have graphs there.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.attention.parts import lengths_differ
from engine.bounds import Bounds
from engine.cuda.adapters.sites import CudaAdapterSites
from engine.cuda.groups.dispatch import CudaDispatch
from engine.cuda.groups.sizes import ask_of
from engine.cuda.hooks.hooked import Hooked
from engine.cuda.ranks.drawing import (
    Draw,
    Drawing,
    Verified,
    drawing_of,
    nothing_drawn,
    pooled_of,
    spoilt_of,
    with_failures,
    with_rest,
)
from engine.cuda.ranks.passing import NoSampling
from engine.cuda.speculation.draft_layers import HeadParts
from engine.cuda.speculation.drawing import Drafting, draft_sampling, widths_of
from engine.cuda.speculation.heads import FusedHead, HeadStep
from engine.cuda.steps.graphs import StepGraph, captured, replay_s
from engine.cuda.steps.handing import Handing
from engine.cuda.steps.inputs import Inputs, attention_of, ends_of, narrowed_of
from engine.cuda.steps.late import CudaLateRows
from engine.cuda.steps.packing import PackedStep, Width, pack, reads_of, width_of
from engine.cuda.steps.shapes import PROMPT_ROWS, Shape, Shapes, most_integers
from engine.cuda.steps.staging import StepStaging
from engine.cuda.waiting import Read, StepWaiter
from engine.cuda.wrapped import forward_of
from engine.model import Decoder
from engine.pool.pools import KvPools
from engine.sampling import Sampler
from engine.sampling.beams import BeamTables
from engine.step.executor import Launched
from engine.step.hooks import Narrowed
from engine.step.lanes import flights_of
from engine.step.plan import StepPlan
from engine.step.sampling import Masks, words_of
from faults import failpoints

Progress = Callable[[str, int, int], None]
NO_HOOKS = Hooked()


class _Computed(NamedTuple):
    hidden: Tensor
    """[R, H]"""
    logits: Tensor
    """[R, vocab]; in other stages than the last the same as `hidden`."""
    spoilt: Tensor | None
    """[R] int32: see `PagedGroups.spoilt`."""


class CudaExecutor:
    """`Executor` over fused kernels, FlashAttention-3 and graphs."""

    def __init__(
        self,
        model: Decoder,
        pools: KvPools,
        attention: PagedGroups,
        sampler: Sampler | None,
        bounds: Bounds,
        hooked: Hooked = NO_HOOKS,
        drafting: Drafting | None = None,
        head: HeadParts | None = None,
        adapters: CudaAdapterSites | None = None,
    ) -> None:
        """Other ranks than the first have no sampler. `drafting`: None: no drafts are verified.
        `head`: keeps KV of its own, and drafts if drafts are verified."""
        self._adapters = adapters
        device = pools.first.device
        self._page_size = pools.first.page_size
        self._drafting, widths = drafting, widths_of(drafting, pools)
        longest = bounds.max_context_tokens + widths[-1] - 1
        self._max_pages = max_pages = -(-longest // self._page_size)
        self._pools = pools
        self._attention = attention
        self._ranks, self._pairs = model.collective, model.pairs
        self._moves = model.dispatch if isinstance(model.dispatch, CudaDispatch) else None
        self._hooked = hooked
        rows = max(bounds.max_sequences, PROMPT_ROWS + 1)
        attention.reserve(bounds.scratch_tokens + PROMPT_ROWS + 1, rows)  # Padding rows have one.
        taps = () if head is None else head.module.taps
        self._forward = forward_of(model, pools, attention, longest, taps)
        self.stream = torch.cuda.Stream(device)
        self._nobody = bounds.max_sequences
        """Slot of padding rows: the last entry of the token table."""
        self._beams = BeamTables(self._nobody, pools, self._write, device)
        if drafting is None:
            self._token_table = torch.zeros(self._nobody + 1, dtype=torch.int32, device=device)
            self._drawing: Drawing = NoSampling(model.config.vocab_size)
            if model.shard.is_last:
                self._drawing = drawing_of(model, sampler, self._token_table, self._beams)
        else:
            self._token_table = drafting.tables.next
            self._drawing = draft_sampling(model, sampler, drafting, self._beams)
        self._most_chosen = min(hooked.graph_pages, max_pages)
        """Pages that a KV head of a narrowed row reads in a graph."""
        self._kv_heads = pools.first.num_kv_heads
        stages = model.shard.stages
        self._shapes = self._shapes_of(bounds, widths, mixes=stages == 1)
        shapes = self._shapes.all
        most_tokens = max(bounds.max_step_tokens, shapes[0].tokens)
        widest = [max_pages, *(width.columns for width in self._widths(most_tokens))]
        self._handing = Handing(model, most_tokens, self._token_table)
        buffers = 2 if stages == 1 else 2 * flights_of(stages)
        self._staging = StepStaging(most_integers(bounds, shapes[0], widest), device, buffers)
        most_rows = max(shape.rows for shape in shapes)
        tables = None if drafting is None else drafting.tables
        if adapters is not None:
            adapters.reserve(most_tokens, most_rows, buffers)
        self._make_inputs = partial(Inputs, max_pages=widest, device=device, drafts=tables)
        self._inputs = self._make_inputs(shapes[0], most_rows)
        self._head: FusedHead | None = None
        if head is not None:
            sizes = most_rows, max_pages, shapes[0].tokens
            self._head = FusedHead(head, self._token_table, tables, *sizes)
        self._graphs: dict[Shape, StepGraph] = {}
        self.late = CudaLateRows(self._token_table, max_pages, device, self._draw_late)
        self._waiter = StepWaiter()
        self._waiting: tuple[Draw, Launched] | None = None
        """The draw of the step launched last, if it waits for masks."""
        self.step_times: dict[Shape, float] = {}
        """Seconds of a step of decode rows of no length, by shape, as captured."""

    def _shapes_of(self, bounds: Bounds, widths: tuple[int, ...], *, mixes: bool) -> Shapes:
        kinds = {"narrows": self._most_chosen > 0, "adapts": self._adapters is not None}
        kinds |= {"mixes": mixes, "prompts": self._moves is None}
        return Shapes(bounds, self._kv_heads, widths=widths, **kinds)

    def _widths(self, prompt_tokens: int) -> list[Width]:
        """The tables of the groups beyond group 0, in steps with so many tokens of prompts."""
        ahead = 0 if self._drafting is None else 1
        size = self._page_size, self._max_pages, prompt_tokens, ahead
        return [width_of(spec.kind, *size) for spec in self._pools.specs[1:]]

    def capture(self, progress: Progress | None = None) -> None:
        """Makes the graph of every shape, and blocks. Without, steps run kernel by kernel."""
        memory, order = torch.cuda.graph_pool_handle(), self._shapes.all
        self.stream.wait_stream(torch.cuda.current_stream())
        for done, shape in enumerate(order, 1):
            self._graphs[shape] = self._capture(shape, memory)
            if progress:
                progress("graphs", done, len(order))

    def drop_graphs(self) -> None:
        """From now on the kernels of every step run one by one."""
        self._graphs.clear()

    @torch.inference_mode()
    def _capture(self, shape: Shape, memory: Any) -> StepGraph:
        self._hooked.capture()
        with torch.cuda.stream(self.stream):
            packed = self._pack(None, shape)
            self.late.warm(packed)
            logits = self._kernels(packed).logits
            if shape.decodes:
                verified = self._verified(self._inputs, shape.decodes, shape.width)
                self._drawing.warm(logits[: shape.decode_tokens], packed.slots, verified)
            self._go_on(packed)
            self._ranks.barrier()
            self.stream.synchronize()
            with captured(memory) as graph:
                done = self._kernels(packed)
            behind = None
            if self._head is not None:
                with captured(memory) as behind:
                    self._go_on(packed)
            if self._drafting is not None and shape.decodes and not shape.prompt_rows:
                graphs = (graph,) if behind is None else (graph, behind)
                self.step_times[shape] = sum(map(replay_s, graphs))
        self._hooked.check_captured()
        hidden = done.hidden if shape.prompt_rows else None
        return StepGraph(graph, hidden, done.logits, done.spoilt, behind)

    def seconds_by_rows_and_width(self) -> dict[tuple[int, int], float]:
        """Seconds of a step of decode rows without context, whatever division of contexts it
        has."""
        found: dict[tuple[int, int], float] = {}
        for shape, seconds in self.step_times.items():
            place = shape.decodes, shape.width
            found[place] = max(seconds, found.get(place, 0.0))
        return found

    def shaped(self, plan: StepPlan) -> StepPlan:
        """See `Executor`. Hooks may say something else on each rank, and sums need one shape."""
        return self._hooked.shaped(plan, self._shapes, self._page_size)

    def ask(self, plan: StepPlan) -> list[int]:
        """What it asks the other workers of its expert group for; see `ask_of`."""
        return ask_of(plan, self._shapes)

    def launch_padding(self) -> None:
        """Queues a step of padding, of the size that the workers of its expert group have agreed
        on: others have tokens for the experts here."""
        own = Shape(self._shapes.all[-1].decodes)
        shape = self._moves and self._moves.shape(own, self._shapes)
        with torch.inference_mode(), torch.cuda.stream(self.stream):
            packed = self._pack(None, shape or own)
            if shape is not None and shape in self._graphs:
                self._graphs[shape].graph.replay()
            else:
                self._kernels(packed)

    def launch(self, plan: StepPlan) -> Launched:
        """Queues the step. Its `result` raises errors of the launch as well as those of the
        device."""
        self.late.begin()
        launched: Launched = Future()
        try:
            failpoints.hit("engine.step")
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                launched = self._launch(plan)
        except Exception as error:
            launched.set_exception(error)
        self.late.launched(launched)
        return launched

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """Pinned memory. The allocator does not reuse it before it is copied."""
        words = words_of(self._drawing.vocab_size)
        bits: NDArray[np.int32] = torch.empty(
            (count, words), dtype=torch.int32, pin_memory=True
        ).numpy()
        return bits

    def sample(self, masks: Masks | None) -> None:
        """Queues the draw that waits. A step whose launch failed has none."""
        if self._waiting is None:
            return
        (draw, future), self._waiting = self._waiting, None
        try:
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                self._finish(self._drawn(draw, masks), future)
        except Exception as error:
            future.set_exception(error)

    def shutdown(self) -> None:
        """Waits for the steps launched. The graphs end before the ranks' communicator may."""
        self._waiter.stop()
        self._graphs.clear()

    def _launch(self, plan: StepPlan) -> Launched:
        self._ranks.begin_step()
        if self._drafting is not None and plan.begins is not None:
            self._drafting.tables.begin(plan.begins)
        if self._pairs is not None:
            self._pairs.note()
        if self._adapters is not None:
            self._adapters.load(plan.adapters_wanted)
        if any(source.size for source, _ in plan.copies) or plan.write_slots.size:
            self._transfer(plan)
        self._handing.begin(plan)
        if self._head is not None:
            self._head.begin(plan, self._staging)
        shape, narrowed = self._hooked.begin(plan, self._shapes, self._page_size)
        shape = self.late.placed(shape, plan, self._shapes)
        if plan.num_tokens == 0:
            self._ranks.barrier()
            self._handing.pass_on()
            return self._finish(with_failures(nothing_drawn, self._hooked.end(None)))
        if self._moves is not None:
            shape = self._moves.shape(shape, self._shapes)
        draw = self._exact(plan, narrowed) if shape is None else self._padded(plan, shape, narrowed)
        draw = draw._replace(failures=self._hooked.end(narrowed))
        if plan.masked.size:
            self._waiting = draw, Future()
            return self._waiting[1]
        return self._finish(self._drawn(draw))

    def _drawn(self, draw: Draw, masks: Masks | None = None) -> Read:
        read = with_rest(self._drawing.draw(draw, masks), draw)
        if draw.plan is not None:
            self._handing.give_tokens(draw.slots)
        return read

    def _transfer(self, plan: StepPlan) -> None:
        """Queues page copies and token table writes before the step. They are rare, so no graph has
        them."""
        self._staging.begin()
        add = self._staging.add
        copies = [(add(source), add(target)) for source, target in plan.copies]
        slots, tokens = add(plan.write_slots), add(plan.write_tokens)
        self._staging.upload()
        for pool, (source, target) in zip(self._pools, copies, strict=True):
            if len(source):
                pool.copy_pages(source.long(), target.long())
        if plan.write_slots.size:
            self._write(slots.long(), tokens)

    def _write(self, slots: Tensor, tokens: Tensor) -> None:
        """Puts tokens that the sampler has not drawn into the token table."""
        if self._drafting is None:
            self._token_table[slots] = tokens.int()
        else:
            self._drafting.tables.write(slots, tokens)

    def _finish(self, read: Read, future: Launched | None = None) -> Launched:
        done = torch.cuda.Event(blocking=True)
        done.record(self.stream)
        return self._waiter.add(done, read, future or Future())

    # -- steps of a shape -----------------------------------------------------------------------

    def _padded(self, plan: StepPlan, shape: Shape, narrowed: Narrowed | None) -> Draw:
        packed = self._pack(self.late.with_place(plan, shape), shape, narrowed)
        self.late.look(packed, plan.num_decodes)
        self._handing.take(shape.tokens)
        ready, hidden = self._graphs.get(shape), None
        then: Callable[[], None] = partial(self._go_on, packed)
        if ready is None:
            hidden, logits, spoilt = self._kernels(packed)
        else:
            ready.graph.replay()
            _, hidden, logits, spoilt, _ = ready
            then = ready.go_on
        if not self._handing.is_last:
            return self._handed_on(packed)
        self.late.computed(logits)
        pooled = pooled_of(plan, hidden, shape.decode_tokens)
        draw = self._draw(plan, packed, logits, self._inputs)
        spoilt = spoilt_of(plan, spoilt, shape.decodes, self._ranks)
        return draw._replace(pooled=pooled, spoilt=spoilt, then=then)

    def _handed_on(self, packed: PackedStep) -> Draw:
        """The end of a step in another stage than the last."""
        self._handing.give(packed.shape.tokens)
        nothing = packed.slots[:0]
        return Draw(nothing, nothing, None, reads_whole=False, scores=[])

    def _draw_late(self, plan: StepPlan, logits: Tensor, slots: Tensor) -> Launched:
        """Queues the draw of a row that came late, whose logits are there or will be."""
        failed: Launched = Future()
        try:
            with torch.inference_mode(), torch.cuda.stream(self.stream):
                draw = Draw(logits, slots, plan.sample, plan.whole_logits, [])
                return self._finish(self._drawing.draw(draw))
        except Exception as error:
            failed.set_exception(error)
        return failed

    def _draw(self, plan: StepPlan, packed: PackedStep, logits: Tensor, inputs: Inputs) -> Draw:
        """The draw of a padded step."""
        if plan.sample is None or len(plan.sample_slots) == plan.num_decodes:
            logits = logits[: plan.decode_tokens]
        else:
            logits = logits.index_select(0, packed.sampled)
        rows = plan.num_decodes, packed.shape.width
        verified = self._verified(inputs, *rows, returns_drafts=plan.returns_drafts)
        given = logits, packed.sample_slots, plan.sample, plan.whole_logits
        return Draw(*given, [], verified=verified, searches=plan.searches)

    def _verified(
        self, inputs: Inputs, decodes: int, width: int, *, returns_drafts: bool = False
    ) -> Verified:
        return Verified(width, inputs.ids, inputs.kept[:decodes], returns_drafts)

    def _pack(
        self, plan: StepPlan | None, shape: Shape, narrowed: Narrowed | None = None
    ) -> PackedStep:
        """Packs the step and queues its copy to the device. No plan: padding only."""
        self._staging.begin()
        widths = self._widths(shape.prompt_tokens)
        size, has_head = self._page_size, self._head is not None
        packed = pack(
            plan, shape, self._staging, self._nobody, size, narrowed, widths, has_head=has_head
        )
        self._staging.upload()
        if self._adapters is not None:
            self._adapters.pack(plan, shape)
        if plan is not None:
            self._beams.follow(plan, packed.page_tables)
        return packed

    def _kernels(self, packed: PackedStep) -> _Computed:
        """What a graph captures."""
        inputs = self._inputs.spread(packed, self._token_table, self._page_size)
        self._attention.prepare(attention_of(packed, inputs))
        narrowed = narrowed_of(packed, inputs[0], self._most_chosen, self._page_size)
        if self._moves is not None:
            self._moves.open(packed.shape.tokens, packed.slots, self._nobody)
        hidden = self._forward.hidden(
            inputs[0].token_ids,
            inputs[0].positions,
            [own.stores for own in inputs],
            ends_of(packed, inputs),
            self._hooked.attend(self._attention.first, narrowed, differ=packed.shape.differ),
            self._tapped(packed.shape),
            self._handing.states(packed.shape.tokens),
        )
        logits = self._forward.logits(hidden) if self._handing.is_last else hidden
        return _Computed(hidden, logits, self._attention.spoilt())

    # -- steps with longer prompts --------------------------------------------------------------

    def _exact(self, plan: StepPlan, narrowed: Narrowed | None) -> Draw:
        """A step without a graph: packed as for one, and not padded."""
        decodes, size = plan.num_decodes, self._page_size
        queries, contexts = plan.query_lens[decodes:], plan.context_lens[decodes:]
        reads = reads_of(plan, narrowed, size)
        differ = lengths_differ(
            plan.context_lens[:decodes] if reads is None else reads, self._kv_heads
        )
        width = plan.width if decodes else 1
        shape = Shape(
            decodes, len(queries), plan.prompt_tokens, differ, narrowed is not None, width,
            plan.adapters.size > 0,
        )  # fmt: skip
        own = self._make_inputs(shape, shape.rows)
        packed = self._pack(plan, shape, narrowed)
        self._handing.take(shape.tokens)
        inputs = own.spread(packed, self._token_table, size)
        skips = [np.zeros_like(contexts)]
        skips += [other.skipped[decodes:] * np.int32(size) for other in plan.others]
        longest = int(queries.max(initial=0))
        self._attention.prepare(
            [
                step._replace(max_query=longest, all_fresh=bool((queries == contexts - skip).all()))
                for step, skip in zip(attention_of(packed, inputs), skips, strict=True)
            ]
        )
        most = 0 if narrowed is None else int(narrowed.counts.max())
        rows = narrowed_of(packed, inputs[0], most, size)
        hooked = self._hooked.attend(self._attention.first, rows, differ=differ)
        ends, scores = ends_of(packed, inputs), []
        given = inputs[0].token_ids, inputs[0].positions, [group.stores for group in inputs]
        all_states = plan.reads_all_states
        tapped, states = self._tapped(shape), self._handing.states(shape.tokens)
        if self._moves is not None:
            self._moves.open(shape.tokens)
        hidden = self._forward.hidden(*given, None if all_states else ends, hooked, tapped, states)
        if not self._handing.is_last:
            return self._handed_on(packed)
        pooled = pooled_of(plan, hidden, None if all_states else shape.decode_tokens)
        if all_states:
            logits_of = self._forward.logits
            scores = [self._drawing.score(hidden, wanted, logits_of) for wanted in plan.scores]
            assert ends is not None, "states of prompts are read"
            hidden = hidden.index_select(0, ends.tokens)
        logits = hidden if plan.sample is None else self._forward.logits(hidden)
        spoilt = spoilt_of(plan, self._attention.spoilt(), decodes, self._ranks)
        draw = self._draw(plan, packed, logits, own)
        then = partial(self._go_on, packed, own, tapped)
        return draw._replace(scores=scores, pooled=pooled, spoilt=spoilt, then=then)

    def _go_on(
        self, packed: PackedStep, inputs: Inputs | None = None, tapped: Tensor | None = None
    ) -> None:
        """A draft head, once tokens are drawn. `inputs` and `tapped`: of a step without a shape."""
        if self._head is None:
            return
        tokens = packed.shape.tokens
        tapped = self._head.room(tokens) if tapped is None else tapped
        self._head.run(HeadStep(packed, (inputs or self._inputs).columns(tokens), tapped))

    def _tapped(self, shape: Shape) -> Tensor | None:
        """[T, N * H], for the taps of a step; None: no head reads any."""
        return None if self._head is None else self._head.room(shape.tokens)
