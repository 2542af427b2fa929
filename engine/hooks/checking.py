"""Checks what hooks return, before anything is done with it. What does not hold is a failure of the
hook: others would fail with it, or get each other's pages."""

from __future__ import annotations

import operator
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.step.hooks import HookTag, Narrowed, StepRows

MOST: Final = np.iinfo(np.int32).max
"""Tags travel as int32."""


def check_tag(tag: object) -> HookTag | None:
    """A tag, or none.

    Raises:
        TypeError: it is something else, or has other things than numbers.
        ValueError: a number is out of its range.
    """
    if tag is None:
        return None
    if not isinstance(tag, HookTag):
        raise TypeError("a tag is a HookTag")
    value, exact = operator.index(tag.value), tag.exact_tokens
    if not 1 <= value <= MOST:
        raise ValueError("a tag's value is not from 1 to the largest int32")
    if exact is not None and operator.index(exact) < 0:
        raise ValueError("a tag's exact tokens are negative")
    return HookTag(value, exact)


def check_narrowed(narrowed: object, step: StepRows) -> Narrowed | None:
    """Rows that a hook narrows in a step, or none.

    Raises:
        TypeError: it is something else.
        ValueError: a row is no decode row with a tag of the hook, comes twice or out of order, or
            reads no page, or more than it has.
    """
    if narrowed is None:
        return None
    if not isinstance(narrowed, Narrowed):
        raise TypeError("rows are narrowed by Narrowed")
    rows, counts = np.asarray(narrowed.rows), np.asarray(narrowed.counts)
    if rows.size == 0:
        return None
    if (
        rows.ndim != 1
        or rows.shape != counts.shape
        or {rows.dtype.kind, counts.dtype.kind} != {"i"}
    ):
        raise ValueError("rows and counts are not two columns of integers")
    if rows[0] < 0 or rows[-1] >= step.num_decodes or (np.diff(rows) <= 0).any():
        raise ValueError("rows are not decode rows in ascending order")
    if (step.tags[rows] == 0).any():
        raise ValueError("a row has no tag of the hook")
    pages = -(-step.context_lens[rows] // step.page_size)
    if ((counts < 1) | (counts > pages)).any():
        raise ValueError("a count is not from 1 to the pages of its row")
    return Narrowed(rows.astype(np.intp), counts.astype(np.int32))


def check_wanted(wanted: object, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """Places in page tables, or none.

    Raises:
        TypeError: it is something else.
        ValueError: the tensor is of another kind.
    """
    if wanted is None:
        return None
    if not isinstance(wanted, Tensor):
        raise TypeError("pages are wanted by a tensor")
    if wanted.shape != shape or wanted.dtype != torch.int64 or wanted.device != device:
        raise ValueError(f"pages are wanted by {wanted.dtype} of shape {tuple(wanted.shape)}")
    return wanted
