"""For debugging: free pages carry a pattern, so that a write by a former holder is found.

A page is filled at once when it becomes FREE, on the step loop's thread. It is FREE only when the
last step that may write it has settled. A granted page is FREE only when its transfer is over. So
nothing may write it until it is allocated again. If it has lost its pattern by then, a former
holder has written it. A read of a free page gives numbers that no model makes.

The pattern is a byte. It is a finite number in every precision of a pool: -1e17 in float32 and
bfloat16, -251 in float16. In FP8 it is -22 with exponent -37, so the number is finite in every
dtype, too. A NaN in a masked position would spoil the attention of requests that did nothing
wrong.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.types import SCRATCH_PAGE, PageIds

logger = logging.getLogger(__name__)

PATTERN = 0xDB
"""The byte of the pattern."""
_WORD = int.from_bytes(bytes([PATTERN] * 4), "little", signed=True)
INSPECTED_BYTES = 16 << 20
"""Bytes that are checked in an idle turn of the step loop. This takes a few milliseconds."""


class PagePoison:
    """A `PageWatch` over the pool's bytes. It belongs to the step loop's thread."""

    def __init__(self, data: Tensor) -> None:
        """`data` is [num_pages, page_bytes] uint8, and a page has a multiple of 4 bytes."""
        self._pages = data.view(torch.int32)
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
        """See `PageWatch`. Each call checks the next part of the pool."""
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
        damaged = ids[(self._pages[ids] != _WORD).any(1)].cpu()
        if not len(damaged):
            return
        self.damaged += len(damaged)
        logger.error(
            "free pages were written", extra={"pages": damaged.tolist(), "in_all": self.damaged}
        )
        if refill:
            self._fill(damaged)

    def _fill(self, pages: Tensor) -> None:
        """Fills pages, and returns when that is done, because a free page may be granted and
        written at once."""
        self._pages[pages.to(self._pages.device)] = _WORD
        if self._pages.is_cuda:
            torch.cuda.current_stream(self._pages.device).synchronize()
