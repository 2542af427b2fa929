"""Pages of a sequence in a group of layers beyond group 0 (`engine.groups.spec`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class GroupPages(NamedTuple):
    """Pages of a sequence."""

    first_page: int
    """Index of the first of them in the sequence."""
    pages: NDArray[np.int32]
    tokens: tuple[int, ...] = ()
    """Tokens that are folded into each, of states that are kept for later prompts; 0 of the others.
    The first page has the newest state, which is never kept."""


class GroupGrant(NamedTuple):
    """Pages that are reserved for a part of a prompt."""

    first_page: int
    """Index of the first of them in the prompt."""
    pages: NDArray[np.int32]
    held_pages: int
    """Leading ones that hold the prompt's KV already. They must not be written."""
