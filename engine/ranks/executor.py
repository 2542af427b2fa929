"""Steps on all ranks: rank 0 sends each step to the others and runs its own part."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.ranks.keeper import Keeper, RankError
from engine.step.executor import Executor, Launched
from engine.step.plan import StepPlan, StepResult
from engine.step.sampling import Masks

REASON_S: Final = 2.0
"""A step that failed waits this long for the reason, seconds: the kernel tells of a dead rank a
moment after its connections broke."""


class RankedExecutor:
    """Sends each step to the other ranks and runs rank 0's part of it.

    An error in a step loses the ranks, because they have not all done the same any more.
    """

    def __init__(
        self,
        own: Executor,
        keeper: Keeper,
        send: Callable[[StepPlan], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`ended` is called when a step has ended on all ranks."""
        self._ended = ended
        self._own = own
        self._keeper = keeper
        self._send = send
        self._runs = False
        """Whether the step launched last runs: its draw may wait for masks."""

    def shaped(self, plan: StepPlan) -> StepPlan:
        """See `Executor`."""
        return self._own.shaped(plan)

    def launch(self, plan: StepPlan) -> Launched:
        """See `Executor`."""
        launched: Launched = Future()
        self._runs = not self._keeper.lost
        if not self._runs:
            launched.set_exception(RankError(self._keeper.lost))
            return launched
        plan = self.shaped(plan)
        self._send(plan)
        self._own.launch(plan).add_done_callback(lambda own: self._pass_on(own, launched))
        return launched

    def mask_bits(self, count: int) -> NDArray[np.int32]:
        """See `Executor`."""
        return self._own.mask_bits(count)

    def sample(self, masks: Masks | None) -> None:
        """See `Executor`."""
        if self._runs:
            self._own.sample(masks)

    def shutdown(self) -> None:
        """See `Executor`."""
        self._own.shutdown()

    def _pass_on(self, own: Launched, launched: Launched) -> None:
        error = own.exception()
        if self._keeper.lost:  # A device that was let go has computed something all the same.
            launched.set_exception(RankError(self._keeper.lost))
            return
        if error is None:
            self._ended()
            result: StepResult = own.result()
            launched.set_result(result)
            return
        reason = self._keeper.reason(REASON_S)
        if not reason:
            reason = f"rank 0: a step failed: {type(error).__name__}: {error}"
            self._keeper.lose(reason)
        launched.set_exception(RankError(reason))
