"""Hooks in the steps of one rank, on the device's thread.

`narrow` -> `begin` -> the layers (`engine.hooks.attention`) -> `end`. In the layers a hook is
called if graphs can contain its calls, or if the step has rows of it. A step that replays a graph
calls none there: the graph contains what they queued when it was captured.

Graphs that contain the calls in which a hook chooses pages are apart from the others. So a step
without narrowed rows costs what it costs without the hook.

A hook that has failed is not called again before the next step. At the end all ranks agree on which
hooks have failed on any of them, so that rank 0 can do what these declare. Where the device runs
steps by itself they do so in steps with rows of some hook, since no request has to do with others.

Whatever a hook does on one rank, all ranks pad a step to the shape that rank 0 sends (`keep_to`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.hooks.calling import Caller, Failures
from engine.hooks.checking import check_narrowed, check_wanted
from engine.step.collective import Collective
from engine.step.hooks import (
    AttentionHook,
    DecodeRows,
    Hook,
    HookError,
    HookFailure,
    HookSite,
    Narrowed,
    StepRows,
)
from engine.step.plan import StepPlan


def _hears_layers(hook: AttentionHook) -> bool:
    """Whether a hook has calls around attention."""
    kind = type(hook)
    return (
        kind.attention_began is not AttentionHook.attention_began
        or kind.attention_ended is not AttentionHook.attention_ended
    )


Gather = Callable[[Tensor], Tensor]
"""[1, H] of this rank -> [N, 1, H] of all ranks, without waiting for the device."""


def _no_page() -> IndexError:
    return IndexError("a row does not have the page")


class StepHooks:
    """The hooks of a rank. Belongs to the device's thread."""

    def __init__(self, hooks: Sequence[Hook], site: HookSite, limit_s: float) -> None:
        self._callers = [Caller(index, hook, limit_s) for index, hook in enumerate(hooks)]
        self._page_size = site.pool.page_size
        self._device = site.pool.device
        self._has_rows = False
        """Whether the step has rows of any."""
        self._steps: list[StepRows] = []
        """As each hook sees the step."""
        attending = [
            (caller, caller.hook)
            for caller in self._callers
            if isinstance(caller.hook, AttentionHook)
        ]
        self._attends = bool(attending)
        self._choosing = next((each for each in attending if each[1].chooses_pages), None)
        self._hearing = [each for each in attending if _hears_layers(each[1])]
        self._captured = [each for each in self._hearing if each[1].capturable]
        self._called: list[tuple[Caller, AttentionHook]] = []
        """Hooks that are called around attention in this step."""
        self.narrowed: Narrowed | None = None
        """The rows that read some of their pages only in this step. Set by `narrow`."""
        self._beyond: list[Tensor] = []
        self.failures: tuple[HookFailure, ...] = ()
        """Failures of the last step. Set by `end`."""

    @property
    def attends(self) -> bool:
        """Whether any may be called in layers."""
        return self._attends

    @property
    def chooses(self) -> bool:
        """Whether one may narrow rows."""
        return self._choosing is not None

    @property
    def graph_pages(self) -> int:
        """The most that a KV head of a narrowed row reads in a graph; 0: no graph has such rows."""
        if self._choosing is None or not self._choosing[1].capturable:
            return 0
        return self._choosing[1].graph_pages

    @property
    def is_called(self) -> bool:
        """Whether any is called around attention in this step."""
        return bool(self._called)

    def is_eager(self, plan: StepPlan) -> bool:
        """Whether no graph can contain what the hooks do in a step, after `narrow`."""
        if self.narrowed is not None and self.narrowed.counts.max() > self.graph_pages:
            return True
        return any(
            not hook.capturable and plan.hook_tags[caller.index].any()
            for caller, hook in self._hearing
        )

    def capture(self) -> None:
        """A graph is captured from here on. It contains the calls of those that fit."""
        for caller in self._callers:
            caller.restart(is_limited=False)
        self._called = self._captured

    def check_captured(self) -> None:
        """What was captured is whole.

        Raises:
            HookError: a call failed.
        """
        for caller in self._callers:
            if caller.failure is not None:
                words = f"{caller.failure.point} failed before the first step"
                raise HookError(f"hook {caller.hook.name} cannot be used: {words}")

    def narrow(self, plan: StepPlan) -> Narrowed | None:
        """A step comes. Asks which of its rows read some of their pages only."""
        for caller in self._callers:
            caller.restart()
        self.narrowed, self._beyond = None, []
        if self._choosing and plan.num_decodes:
            caller, hook = self._choosing
            step = self._rows_of(plan, caller.index, plan.num_decodes)
            check = partial(check_narrowed, step=step)
            self.narrowed = caller.call(hook.rows_narrowed, step, check=check)
        return self.narrowed

    def keep_to(self, most: int) -> None:
        """After `narrow`: rank 0 has flags a shape in which a KV head of a narrowed row reads at
        most so many pages; 0: no row is narrowed, perhaps since the hook has failed there."""
        if not self._choosing or self.narrowed is None or self.narrowed.counts.max() <= most:
            return
        self.narrowed = None
        if most:
            error = ValueError("a row reads more pages than on rank 0")
            self._choosing[0].fail("rows_narrowed", error)

    def begin(self, plan: StepPlan, prompts_at: int | None = None) -> None:
        """The step begins. Its prompts' tokens begin at `prompts_at` if it is padded."""
        self._has_rows = bool(plan.hook_tags.any())
        at = plan.num_decodes if prompts_at is None else prompts_at
        self._steps = [self._rows_of(plan, caller.index, at) for caller in self._callers]
        self._called = [
            (caller, hook)
            for caller, hook in self._hearing
            if hook.capturable or plan.hook_tags[caller.index].any()
        ]
        for caller, step in zip(self._callers, self._steps, strict=True):
            caller.call(caller.hook.step_began, step)
        if self._choosing and self._choosing[0].failure:
            self.narrowed = None

    def end(self, collective: Collective) -> None:
        """The forward pass is done."""
        self._step_ended()
        if self._choosing and self._beyond and bool(torch.stack(self._beyond).any()):
            self._choosing[0].fail("pages_wanted", _no_page())
        failed = [caller.failure is not None for caller in self._callers]
        own = torch.tensor([failed], dtype=torch.float32, device=self._device)
        self.failures = self._anywhere(collective.all_reduce(own)[0].bool().tolist())

    def end_queued(self, gather: Gather | None = None) -> Failures:
        """The forward pass is queued. The result returns the failures when the device is done.

        Args:
            gather: of several ranks. All of them queue it, or none.
        """
        self._step_ended()
        failed = tuple(caller.failure for caller in self._callers if caller.failure is not None)
        beyond = None
        if self._choosing and not self._choosing[0].failure and self._beyond:
            beyond = torch.stack(self._beyond).any()
        flags = gather(self._flags(beyond)) if gather and self._has_rows else None
        if beyond is None and flags is None:
            return lambda: failed
        return self._failures_of(failed, beyond, flags)

    def _flags(self, beyond: Tensor | None) -> Tensor:
        """[1, H] float32, whether each hook has failed on this rank. The host does not wait."""
        flags = torch.zeros(1, len(self._callers), device=self._device)
        for caller in self._callers:
            if caller.failure is not None:
                flags[0, caller.index].fill_(1)
        if beyond is not None and self._choosing:
            flags[0, self._choosing[0].index].copy_(beyond)
        return flags

    def _failures_of(
        self, failed: tuple[HookFailure, ...], beyond: Tensor | None, flags: Tensor | None
    ) -> Failures:
        """Returns what the host knows, and what the device will have reported by then."""
        beyond = None if beyond is None else _to_host(beyond)
        flags = None if flags is None else _to_host(flags)

        def failures() -> tuple[HookFailure, ...]:
            found = {failure.hook: failure for failure in failed}
            if beyond is not None and self._choosing and bool(beyond):
                caller = self._choosing[0]
                found[caller.index] = caller.logged("pages_wanted", _no_page())
            if flags is not None:
                for index in flags.any(0).flatten().nonzero().flatten().tolist():
                    found.setdefault(index, self._elsewhere(index))
            return tuple(found.values())

        return failures

    def _anywhere(self, failed: list[bool]) -> tuple[HookFailure, ...]:
        """Failures, given which hooks have failed on any rank."""
        return tuple(
            caller.failure or self._elsewhere(caller.index)
            for caller in self._callers
            if failed[caller.index]
        )

    def _elsewhere(self, index: int) -> HookFailure:
        return HookFailure(index, self._callers[index].hook.name, "another rank")

    def _step_ended(self) -> None:
        for caller, step in zip(self._callers, self._steps, strict=True):
            caller.call(caller.hook.step_ended, step)

    def choosing_began(self, rows: DecodeRows) -> None:
        """The forward pass of a step with narrowed rows begins."""
        assert self._choosing, "some hook has narrowed rows"
        caller, hook = self._choosing
        caller.call(hook.choosing_began, rows)

    def attention_began(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A layer's attention begins. Shapes as in `AttentionHook`."""
        for caller, hook in self._called:
            caller.call(hook.attention_began, layer, q, k, v)

    def pages_wanted(self, layer: int, q: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        """What the hook that narrows rows wants of them, as a tensor of this shape; None: all
        pages."""
        assert self._choosing, "some hook has narrowed rows"
        caller, hook = self._choosing
        check = partial(check_wanted, shape=shape, device=q.device)
        return caller.call(hook.pages_wanted, layer, q, check=check)

    def note_beyond(self, beyond: Tensor) -> None:
        """Adds a flag on the device, not 0 if a hook chose a page outside of its row. It is read at
        the end of the step, since no layer waits for the device."""
        self._beyond.append(beyond)

    def attention_ended(self, layer: int, q: Tensor, out: Tensor) -> None:
        """A layer's attention is done. Shapes as in `AttentionHook`."""
        for caller, hook in self._called:
            caller.call(hook.attention_ended, layer, q, out)

    def _rows_of(self, plan: StepPlan, index: int, prompts_at: int) -> StepRows:
        return StepRows(
            number=plan.number,
            tags=plan.hook_tags[index],
            query_lens=plan.query_lens,
            context_lens=plan.context_lens,
            num_decodes=plan.num_decodes,
            prompts_at=prompts_at,
            page_table=plan.page_table,
            page_size=self._page_size,
            arrived=plan.arrived,
        )


def _to_host(tensor: Tensor) -> Tensor:
    """Queues a copy."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
