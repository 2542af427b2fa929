"""Steps of a worker of an expert group on a GPU: each is queued in its turn, as on all workers."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.cuda.executor import CudaExecutor
from engine.cuda.groups.dispatch import CudaDispatch
from engine.step.collective import CollectiveError
from engine.step.executor import Launched
from engine.step.plan import StepPlan
from engine.step.sampling import Masks

log = logging.getLogger("baton.engine")


class GroupedCudaExecutor:
    """Waits for the turn of a step before it launches it. A step that fails loses the group: the
    devices of the others wait in it."""

    def __init__(self, own: CudaExecutor, dispatch: CudaDispatch) -> None:
        """`dispatch` is that of `own`'s model."""
        self._own, self._dispatch = own, dispatch
        self._queueing = threading.Lock()
        """A step without tokens comes on another thread."""
        self._waits = False
        """Whether the step launched last is drawn later: until then it keeps its turn, since the
        next one overwrites what is drawn from."""
        dispatch.run_padding = self._run_padding

    def shaped(self, plan: StepPlan) -> StepPlan:
        """See `Executor`."""
        return self._own.shaped(plan)

    def launch(self, plan: StepPlan) -> Launched:
        """See `Executor`."""
        launched: Launched = Future()
        try:
            if plan.num_tokens:
                self._dispatch.begin(self._own.ask(plan))
        except CollectiveError as error:
            launched.set_exception(error)
            return launched
        with self._queueing:
            own = self._own.launch(plan)
        self._waits = plan.masked.size > 0
        if plan.num_tokens and not self._waits:
            self._dispatch.end()
        own.add_done_callback(partial(self._pass_on, launched, plan.num_tokens > 0))
        return launched

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """See `Executor`."""
        return self._own.mask_bits(count)

    def sample(self, masks: Masks | None) -> None:
        """See `Executor`."""
        self._own.sample(masks)
        if self._waits:
            self._waits = False
            self._dispatch.end()

    def shutdown(self) -> None:
        """See `Executor`."""
        self._own.shutdown()

    def _run_padding(self) -> None:
        with self._queueing:
            self._own.launch_padding()

    def _pass_on(self, launched: Launched, had_turn: bool, own: Launched) -> None:
        member, error = self._dispatch.member, own.exception()
        if error is not None and not member.lost:
            log.error("a step failed, and the others wait in it", exc_info=error)
            member.lose(f"a step failed, and the others wait in it: {type(error).__name__}")
        if member.lost:  # A device that was let go has computed something all the same.
            launched.set_exception(CollectiveError(member.lost))
        elif error is not None:
            launched.set_exception(error)
        else:
            launched.set_result(own.result())
        if had_turn:
            member.ended()
