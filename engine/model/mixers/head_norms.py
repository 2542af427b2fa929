"""RMS norm of q and k, before rope.

Shapes: T tokens, Hq query heads, Hkv KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from engine.model.config import ModelConfig
from engine.model.linear import Build, RmsNorm
from engine.model.mixers.config import AttentionConfig, QkNorm
from engine.model.places import Place, of_norm
from engine.model.region import Range


class HeadNorm(nn.Module):
    """Over each head, with one weight for all heads."""

    def __init__(self, own: AttentionConfig, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self._names = own.q_norm, own.k_norm
        size, eps, plus_one = own.head_dim, config.norm_eps, config.norm_plus_one
        self.q = RmsNorm(size, eps, build, plus_one=plus_one)
        self.k: RmsNorm | None = None
        if own.kv_from is None:
            self.k = RmsNorm(size, eps, build, plus_one=plus_one)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[T, Hq, D] and [T, Hkv, D]."""
        assert self.k is not None, "a layer that reads another's K has none"
        return self.q(q), self.k(k)

    def places(self, attention: str) -> Iterator[Place]:
        """The parts of its weights. `attention`: the module that has them."""
        yield of_norm(f"{attention}.{self._names[0]}", self.q)
        if self.k is not None:
            yield of_norm(f"{attention}.{self._names[1]}", self.k)


class WholeNorm(nn.Module):
    """Over all heads together, each number with a weight of its own. Ranks add up the squares of
    their heads."""

    def __init__(self, own: AttentionConfig, config: ModelConfig, build: Build) -> None:
        super().__init__()
        self._collective, shard, dim = build.collective, build.shard, own.head_dim
        self._rows = [
            Range(held.start * dim, held.end * dim)
            for held in (shard.even(own.heads), shard.shared(own.kv_heads))
        ]
        self._wholes = own.heads * dim, own.kv_heads * dim
        self._holders = max(1, shard.count // own.kv_heads)
        """Ranks that have the same KV head."""
        eps, plus_one = config.norm_eps, config.norm_plus_one
        sizes = (rows.size for rows in self._rows)
        self.q, self.k = (RmsNorm(size, eps, build, plus_one=plus_one) for size in sizes)

    @property
    def is_alone(self) -> bool:
        """Whether this rank has all heads."""
        return self._collective.size == 1

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """[T, Hq, D] and [T, Hkv, D]."""
        if self.is_alone:
            return self.q(q.flatten(1)).view_as(q), self.k(k.flatten(1)).view_as(k)
        squares = [x.float().square().sum((1, 2)) for x in (q, k)]
        sums = torch.stack((squares[0], squares[1] / self._holders), dim=1)
        means = self._collective.all_reduce(sums) / sums.new_tensor(self._wholes)
        factors = torch.rsqrt(means + self.q.eps)[:, :, None, None].unbind(1)
        return _scaled(q, factors[0], self.q.weight), _scaled(k, factors[1], self.k.weight)

    def places(self, attention: str) -> Iterator[Place]:
        """See `HeadNorm`."""
        norms = zip(("q_norm", "k_norm"), (self.q, self.k), self._rows, self._wholes, strict=True)
        for name, norm, rows, whole in norms:
            yield of_norm(f"{attention}.{name}", norm, rows, whole)


def _scaled(x: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * factor * weight.view(x.shape[1:]).float()).to(x.dtype)


QK_NORMS: Final[dict[QkNorm, type[HeadNorm] | type[WholeNorm]]] = {
    QkNorm.HEAD: HeadNorm,
    QkNorm.WHOLE: WholeNorm,
}
