"""Debugging: pages that nobody holds carry a pattern, so that no foreign access passes unseen.

A page is filled when it becomes FREE, on the step loop's thread and at once. It is FREE only when
the last step that may write it has settled, and a granted page only when its transfer is over, so
nothing may write it until it is allocated again: a page that has lost its pattern by then was
written by somebody who no longer held it. Whoever reads a free page gets numbers that no model
makes.

The pattern is large and finite in every dtype of a pool: a NaN in a masked position would poison
the attention of requests that have done nothing wrong.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.pages.blocks import SCRATCH_PAGE
from engine.types import PageIds

logger = logging.getLogger(__name__)

PATTERN = 24576.0
"""Exact in bfloat16, float16 and float32."""
INSPECTED_BYTES = 16 << 20
"""Looked at in an idle turn of the step loop: a few milliseconds."""


class PagePoison:
    """A `PageWatch` over the pool's tensor, pages first. The step loop's thread's."""

    def __init__(self, pages: Tensor) -> None:
        self._pages = pages.view(pages.shape[0], -1)
        self._inspected = 0
        self.damaged = 0
        self._fill(torch.arange(SCRATCH_PAGE + 1, len(self._pages)))

    def freed(self, pages: PageIds) -> None:
        """See `PageWatch`."""
        if len(pages):
            self._fill(torch.from_numpy(pages).long())

    def allocated(self, pages: PageIds) -> None:
        """See `PageWatch`."""
        self._check(pages, refill=False)

    def idle(self, is_free: NDArray[np.bool_]) -> None:
        """See `PageWatch`. The pool is gone through bit by bit."""
        page_bytes = self._pages[0].numel() * self._pages.element_size()
        count = max(1, INSPECTED_BYTES // page_bytes)
        end = self._inspected + count
        pages = np.flatnonzero(is_free[self._inspected : end]) + self._inspected
        self._inspected = 0 if end >= len(is_free) else end
        self._check(pages.astype(np.int32), refill=True)

    def _check(self, pages: PageIds, *, refill: bool) -> None:
        if not len(pages):
            return
        ids = torch.from_numpy(pages).long().to(self._pages.device)
        damaged = ids[(self._pages[ids] != PATTERN).any(1)].cpu()
        if not len(damaged):
            return
        self.damaged += len(damaged)
        logger.error(
            "free pages were written", extra={"pages": damaged.tolist(), "in_all": self.damaged}
        )
        if refill:
            self._fill(damaged)

    def _fill(self, pages: Tensor) -> None:
        """Done when this returns: a page may be granted, and written, the moment it is free."""
        self._pages[pages.to(self._pages.device)] = PATTERN
        if self._pages.is_cuda:
            torch.cuda.current_stream(self._pages.device).synchronize()
