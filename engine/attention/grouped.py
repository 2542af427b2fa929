"""Attention of a model whose layers are in several groups. Each group has a pool, page tables and
a backend of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention.paged import Decode, PagedAttention, PagedStep
from engine.attention.recurrent.short_conv import ShortConvBackend
from engine.attention.recurrent.states import RecurrentBackend
from engine.pool.pools import Place
from engine.step.attention import AttentionBackend, AttentionBatch, StepAttention


class GroupedAttention:
    """`StepAttention` over the backends of the groups."""

    def __init__(self, backends: Sequence[StepAttention], places: Mapping[int, Place]) -> None:
        """`places`: by layer of the model."""
        self.name = backends[0].name
        self.backends = backends
        self._places = places

    def begin(self, batch: AttentionBatch) -> None:
        """See `StepAttention`."""
        for backend, own in zip(self.backends, (batch, *batch.others), strict=True):
            backend.begin(own)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `StepAttention`."""
        group, own = self._places[layer]
        return self.backends[group](own, q, k, v)

    @property
    def spoilt(self) -> Tensor | None:
        """After all layers of a step: the rows that have found a wrong state, [R]; None: no layer
        has states."""
        found = [each.spoilt for each in self.backends if isinstance(each, RecurrentBackend)]
        return torch.stack(found).any(0) if found else None


class GroupEnds(NamedTuple):
    """The last positions of S rows in a group: of the first `decodes` rows `width` each, of the
    others one."""

    contexts: Tensor
    """[S] int32, tokens of the row in the group's table up to its last one."""
    page_table: Tensor
    """[S, P] int32."""
    decodes: int = 0
    width: int = 1


Member = PagedAttention | ShortConvBackend | RecurrentBackend
"""What kernels read pages of a group with."""


class PagedGroups:
    """`PagedAttention` of each group, or its convolutions or states, by layer of the model."""

    def __init__(self, members: Sequence[Member], places: Mapping[int, Place]) -> None:
        """`places`: by layer of the model."""
        self.members = members
        self._places = places

    @property
    def first(self) -> PagedAttention:
        """Attention of group 0."""
        return self._of(0)

    def _of(self, group: int) -> PagedAttention:
        member = self.members[group]
        assert isinstance(member, PagedAttention), "convolutions and states are not asked to attend"
        return member

    def step(self, group: int) -> PagedStep:
        """The step as a group of convolutions has it."""
        member = self.members[group]
        assert isinstance(member, ShortConvBackend)
        return member.step

    def states(self, group: int) -> RecurrentBackend:
        """A group of states, for their kernels."""
        member = self.members[group]
        assert isinstance(member, RecurrentBackend)
        return member

    def spoilt(self) -> Tensor | None:
        """After all layers of a step: [R] int32, 1 for rows that have found a wrong state; None: no
        layer has states."""
        found = [each.found for each in self.members if isinstance(each, RecurrentBackend)]
        return torch.stack(found).amax(0) if found else None

    def reserve(self, tokens: int, rows: int) -> None:
        """See `PagedAttention`."""
        for member in self.members:
            member.reserve(tokens, rows)

    def prepare(self, steps: Sequence[PagedStep]) -> None:
        """Sets the step for the next calls, in each group."""
        for member, step in zip(self.members, steps, strict=True):
            member.prepare(step)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, decode: Decode | None = None
    ) -> Tensor:
        """See `PagedAttention`."""
        group, own = self._places[layer]
        return self._of(group).attend(own, q, k, v, decode)

    def attend_ends(self, layer: int, q: Tensor, ends: Sequence[GroupEnds]) -> Tensor:
        """See `PagedAttention`. `ends`: by group."""
        group, own = self._places[layer]
        contexts, table, decodes, width = ends[group]
        attend = self._of(group).attend_ends
        if decodes == 0 or width == 1:
            return attend(own, q, contexts, table)
        tokens = decodes * width
        wide = attend(own, q[:tokens], contexts[:decodes], table[:decodes])
        return torch.cat((wide, attend(own, q[tokens:], contexts[decodes:], table[decodes:])))


def paged_groups(
    backends: Sequence[AttentionBackend], places: Mapping[int, Place]
) -> PagedGroups | None:
    """The backends of all groups as one; None: one does not read pages by kernels."""
    paged = [backend for backend in backends if isinstance(backend, Member)]
    return PagedGroups(paged, places) if len(paged) == len(backends) else None
