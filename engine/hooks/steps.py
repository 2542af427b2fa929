"""Hooks in the steps of one rank, on the device's thread.

`begin` -> the layers (`engine.hooks.attention`) -> `end`. In the layers a hook is called if a graph
can contain its calls, or if the step has rows of it. A step that replays a graph calls none there:
the graph contains what they queued when it was captured.

A hook that has failed is not called again before the next step. At the end all ranks agree on which
hooks have failed on any of them, so that rank 0 can do what these declare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.hooks.calling import Caller, HookFailure
from engine.hooks.checking import check_narrowed, check_wanted
from engine.hooks.protocol import AttentionHook, Hook, HookError, HookSite, Narrowed, StepRows
from engine.ranks.collective import Collective
from engine.schedule.step import StepPlan


def fits_graphs(hook: AttentionHook) -> bool:
    """Whether a graph can contain a hook's calls. The rows that read some of their pages only are
    others in each step, and so are the shapes of what is computed for them."""
    return hook.capturable and not hook.chooses_pages


class StepHooks:
    """The hooks of a rank. Belongs to the device's thread."""

    def __init__(self, hooks: Sequence[Hook], site: HookSite, limit_s: float) -> None:
        self._callers = [Caller(index, hook, limit_s) for index, hook in enumerate(hooks)]
        self._page_size = site.pool.page_size
        self._steps: list[StepRows] = []
        """As each hook sees the step."""
        self._attending = [
            (caller, caller.hook)
            for caller in self._callers
            if isinstance(caller.hook, AttentionHook)
        ]
        self._choosing = next((each for each in self._attending if each[1].chooses_pages), None)
        self._captured = [each for each in self._attending if fits_graphs(each[1])]
        self._called: list[tuple[Caller, AttentionHook]] = []
        """Those that are called in the layers of this step."""
        self.narrowed: Narrowed | None = None
        """The rows that read some of their pages only in this step. Set by `begin`."""
        self._beyond: list[Tensor] = []
        self.failures: tuple[HookFailure, ...] = ()
        """Of the last step. Set by `end`."""

    @property
    def attends(self) -> bool:
        """Whether any may be called in layers."""
        return bool(self._attending)

    @property
    def fits(self) -> bool:
        """Whether graphs contain calls of any."""
        return bool(self._captured)

    @property
    def is_called(self) -> bool:
        """Whether any is called in the layers of this step."""
        return bool(self._called)

    def is_eager(self, plan: StepPlan) -> bool:
        """Whether the step has rows of a hook whose calls no graph can contain."""
        return any(
            not fits_graphs(hook) and plan.hook_terms[caller.index].any()
            for caller, hook in self._attending
        )

    def capture(self) -> None:
        """A graph is captured from here on. It contains the calls of those that fit."""
        for caller, _ in self._captured:
            caller.restart()
        self._called = self._captured

    def check_captured(self) -> None:
        """What was captured is whole.

        Raises:
            HookError: a call failed.
        """
        for caller, hook in self._captured:
            if caller.failure is not None:
                raise HookError(
                    f"hook {hook.name} cannot be captured: {caller.failure.point} failed"
                )

    def begin(self, plan: StepPlan, prompts_at: int | None = None) -> None:
        """A step begins. Its prompts' tokens begin at `prompts_at` if it is padded."""
        at = plan.num_decodes if prompts_at is None else prompts_at
        self._steps = [self._rows_of(plan, caller.index, at) for caller in self._callers]
        self._called = [
            (caller, hook)
            for caller, hook in self._attending
            if fits_graphs(hook) or plan.hook_terms[caller.index].any()
        ]
        for caller, step in zip(self._callers, self._steps, strict=True):
            caller.restart()
            caller.call(caller.hook.step_began, step)
        self.narrowed, self._beyond = None, []
        if self._choosing and plan.num_decodes:
            caller, hook = self._choosing
            step = self._steps[caller.index]
            check = partial(check_narrowed, step=step)
            self.narrowed = caller.call(hook.rows_narrowed, step, check=check)

    def end(self, collective: Collective) -> None:
        """The forward pass is done."""
        self._step_ended()
        if self._choosing and self._beyond and bool(torch.stack(self._beyond).any()):
            self._choosing[0].fail("pages_wanted", IndexError("a row does not have the page"))
        failed = [caller.failure is not None for caller in self._callers]
        anywhere = collective.all_reduce(torch.tensor(failed, dtype=torch.float32)).bool().tolist()
        self.failures = tuple(
            caller.failure or HookFailure(caller.index, caller.hook.name, "another rank")
            for caller, has_failed in zip(self._callers, anywhere, strict=True)
            if has_failed
        )

    def end_queued(self) -> Callable[[], tuple[HookFailure, ...]]:
        """The forward pass of a rank that is alone is queued. Returns what tells the failures when
        the device is done."""
        self._step_ended()
        failed = tuple(caller.failure for caller in self._callers if caller.failure is not None)
        if not self._choosing or self._choosing[0].failure or not self._beyond:
            return lambda: failed
        caller, beyond = self._choosing[0], torch.stack(self._beyond).any()
        host = torch.empty((), dtype=torch.bool, pin_memory=beyond.is_cuda)
        host.copy_(beyond, non_blocking=True)
        late = HookFailure(caller.index, caller.hook.name, "pages_wanted")
        return lambda: (*failed, late) if bool(host) else failed

    def _step_ended(self) -> None:
        for caller, step in zip(self._callers, self._steps, strict=True):
            caller.call(caller.hook.step_ended, step)

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
        """Where places that a hook wants are none of the row's. It is read at the end of the step,
        since no layer waits for the device."""
        self._beyond.append(beyond.any())

    def attention_ended(self, layer: int, q: Tensor, out: Tensor) -> None:
        """A layer's attention is done. Shapes as in `AttentionHook`."""
        for caller, hook in self._called:
            caller.call(hook.attention_ended, layer, q, out)

    def _rows_of(self, plan: StepPlan, index: int, prompts_at: int) -> StepRows:
        return StepRows(
            number=plan.number,
            terms=plan.hook_terms[index],
            query_lens=plan.query_lens,
            context_lens=plan.context_lens,
            num_decodes=plan.num_decodes,
            prompts_at=prompts_at,
            page_table=plan.page_table,
            page_size=self._page_size,
            arrived=plan.arrived,
        )
