"""What lies between two parts of the model: a sum with the residual, and norms.

One of several ranks has a part of the sum. All ranks add theirs up first, in the same kernel where
there is one for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from engine.cuda import kernels
from engine.cuda.experts.summing import Parts, add_up, add_up_norm
from engine.cuda.feed_forward import as_read
from engine.cuda.products.joins import join
from engine.cuda.products.rounding import add_rms_norm_rounded, rms_norm_rounded
from engine.cuda.ranks.collective import CudaCollective
from engine.model.linear import RmsNorm
from engine.model.precision.rounding import Rounded, Rounding
from engine.step.collective import Collective

Reads = Callable[[], Rounding | None]
"""Says how a product takes its input in the step that runs; None: in the model's dtype."""


class Join(NamedTuple):
    """What happens between two parts of the model: the first one's output is added to the residual,
    and the second one reads the sum."""

    after: RmsNorm | None
    """Norm of the output."""
    before: RmsNorm | None
    """Norm of the sum."""
    reads: Reads
    """How the next product rounds its input."""
    factor: float
    """On the output."""
    scalar: Tensor | None = None
    """One number, the factor on the sum."""
    keeps: bool = False
    """The second one reads what the first one has read, and not the sum."""
    rounds_one: bool = False
    """The second one rounds a single row itself."""

    @property
    def is_plain(self) -> bool:
        """Whether it is a sum and its norm, without a factor, as in Llama."""
        has_norm = self.before is not None and not self.before.centred
        return has_norm and self.after is None and self.factor == 1.0 and self.scalar is None

    def reader_of(self, rows: int) -> Rounding | None:
        """How so many rows are rounded."""
        return None if self.rounds_one and rows == 1 else self.reads()


Joined = Callable[[Tensor, Tensor | Parts, Join], Tensor | Rounded]
"""See `joined`."""


def entered(x: Tensor, how: Join) -> Tensor | Rounded:
    """What the first layer reads."""
    norm, reader = how.before, how.reads()
    if norm is None:
        return as_read(x, reader)
    if norm.centred:
        return as_read(norm(x), reader)
    if reader is None:
        return kernels.rms_norm(x, norm.weight, norm.eps)
    return rms_norm_rounded(x, norm.weight, norm.eps, reader)


def joined(residual: Tensor, x: Tensor | Parts, how: Join) -> Tensor | Rounded:
    """Adds `x` to `residual` in place; returns what the next product reads."""
    norm, reader = how.before, how.reader_of(residual.shape[0])
    if norm is None or not how.is_plain:
        return _joined_otherwise(residual, _added_up(x), how)
    if isinstance(x, Parts):
        return add_up_norm(residual, x, norm.weight, norm.eps, reader)
    if reader is None:
        return kernels.add_rms_norm(residual, x, norm.weight, norm.eps)
    return add_rms_norm_rounded(residual, x, norm.weight, norm.eps, reader)


def _joined_otherwise(residual: Tensor, x: Tensor, how: Join) -> Tensor | Rounded:
    """With norms elsewhere, or a factor. Rounding is a pass of its own here."""
    after, before = (None if norm is None else norm.weight for norm in (how.after, how.before))
    eps = next((norm.eps for norm in (how.after, how.before) if norm is not None), 0.0)
    centred = how.before is not None and how.before.centred
    arguments = (residual, x, after, before, eps, how.factor, how.scalar)
    return as_read(join(*arguments, centred=centred), how.reader_of(residual.shape[0]))


def _added_up(x: Tensor | Parts) -> Tensor:
    return add_up(x) if isinstance(x, Parts) else x


def joiner(collective: Collective) -> Joined:
    """`joined` for one of these ranks."""
    if collective.size == 1:
        return joined
    assert isinstance(collective, CudaCollective)
    return partial(_joined_by_all, collective)


def _joined_by_all(
    ranks: CudaCollective, residual: Tensor, x: Tensor | Parts, how: Join
) -> Tensor | Rounded:
    """`x` is this rank's part."""
    x = _added_up(x)
    norm = how.before
    if norm is None or not how.is_plain or how.reader_of(residual.shape[0]) is not None:
        return joined(residual, ranks.all_reduce(x), how)
    return ranks.add_rms_norm(residual, x, norm.weight, norm.eps)
