"""A gated feed-forward, and experts beside it. Both read the residual, through norms of their own.

Shapes: T tokens of a step, H hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn

from engine.model.config import BesideConfig, ModelConfig
from engine.model.experts.layer import Experts
from engine.model.linear import Build, RmsNorm
from engine.model.places import Place, of_norm, plain
from engine.model.precision.base import Format, Get, parameter
from engine.model.shard import Shard


class Beside(nn.Module):
    """See `engine.model.feed_forward.FeedForward`."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        own: BesideConfig,
        build: Build,
        gated: nn.Module,
        experts: Experts,
    ) -> None:
        """Makes the one of layer `index`. `gated` and `experts` are its parts."""
        super().__init__()
        self.gated = gated
        self.experts = experts
        hidden, eps = config.hidden_size, config.norm_eps
        names = own.before_gated, own.after_gated, own.before_experts, own.after_experts
        self._names = [config.layer_name(index, name) for name in names]
        self.norms = nn.ModuleList(RmsNorm(hidden, eps, build) for _ in names)
        self.router_norm = RmsNorm(hidden, eps, build)
        """Its gain is the scale, by the root of H."""
        self._router_scale = config.layer_name(index, own.router_scale)
        self._factor = hidden**-0.5
        count = own.experts.routing.experts
        self.expert_scale = parameter((count,), build.dtype, build.device)
        self._expert_scale = config.layer_name(index, own.expert_scale)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H], with the ranks' sums."""
        before, after, before_experts, after_experts = self.norms
        chosen = self.experts.choose(self.router_norm(x))
        weights = chosen.weights * self.expert_scale[chosen.experts]
        mixed = self.experts(before_experts(x), chosen._replace(weights=weights))
        out: Tensor = after(self.gated(before(x))) + after_experts(mixed)
        return out

    def places(self, form: Format | None, shard: Shard) -> Iterator[Place]:
        """See `FeedForward`."""
        for name, norm in zip(self._names, self.norms, strict=True):
            assert isinstance(norm, RmsNorm)
            yield of_norm(name, norm)
        scale = plain(self._router_scale, self.router_norm.weight)
        yield scale._replace(fill=partial(_fill_scaled, scale, self.router_norm, self._factor))
        yield plain(self._expert_scale, self.expert_scale)
        yield from self.gated.places(form, shard)  # type: ignore[operator]
        yield from self.experts.places(form, shard)


def _fill_scaled(place: Place, norm: RmsNorm, factor: float, get: Get) -> None:
    place.fill(get)
    norm.weight.mul_(factor)
