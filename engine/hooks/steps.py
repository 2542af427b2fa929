"""Hooks in the steps of one rank, on the device's thread.

`begin` -> the layers (`engine.hooks.attention`) -> `end`. A hook that has failed is not called
again before the next step. At the end all ranks agree on which hooks have failed on any of them, so
that rank 0 can do what these declare.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from engine.hooks.calling import Caller, HookFailure
from engine.hooks.checking import check_narrowed, check_wanted
from engine.hooks.protocol import AttentionHook, Hook, HookSite, Narrowed, StepRows
from engine.ranks.collective import Collective
from engine.schedule.step import StepPlan


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
        self.narrowed: Narrowed | None = None
        """The rows that read some of their pages only in this step. Set by `begin`."""
        self._beyond: list[Tensor] = []
        self.failures: tuple[HookFailure, ...] = ()
        """Of the last step. Set by `end`."""

    def begin(self, plan: StepPlan) -> None:
        """A step begins."""
        self._steps = [self._rows_of(plan, caller.index) for caller in self._callers]
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
        for caller, step in zip(self._callers, self._steps, strict=True):
            caller.call(caller.hook.step_ended, step)
        if self._choosing and self._beyond and bool(torch.stack(self._beyond).any()):
            self._choosing[0].fail("pages_wanted", IndexError("a row does not have the page"))
        failed = [caller.failure is not None for caller in self._callers]
        anywhere = collective.all_reduce(torch.tensor(failed, dtype=torch.float32)).bool().tolist()
        self.failures = tuple(
            caller.failure or HookFailure(caller.index, caller.hook.name, "another rank")
            for caller, has_failed in zip(self._callers, anywhere, strict=True)
            if has_failed
        )

    def attention_began(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A layer's attention begins. Shapes as in `AttentionHook`."""
        for caller, hook in self._attending:
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
        for caller, hook in self._attending:
            caller.call(hook.attention_ended, layer, q, out)

    def _rows_of(self, plan: StepPlan, index: int) -> StepRows:
        return StepRows(
            number=plan.number,
            terms=plan.hook_terms[index],
            query_lens=plan.query_lens,
            context_lens=plan.context_lens,
            num_decodes=plan.num_decodes,
            page_table=plan.page_table,
            page_size=self._page_size,
            arrived=plan.arrived,
        )
