"""Attention over latents with fused kernels: the norm of a latent, rope and the store are one."""

from __future__ import annotations

from torch import Tensor

from engine.attention.grouped import PagedGroups
from engine.cuda import kernels
from engine.cuda.kv.latent_store import latent_store
from engine.cuda.mixers.attention import RopeTables
from engine.cuda.mixers.base import RowEnds, StepTokens
from engine.cuda.products.rounding import rms_norm_rounded
from engine.model.mixers.latent import LatentAttention
from engine.model.precision.rounding import Rounded, Rounding
from engine.pool.pools import KvPools


class FusedLatent:
    """See `FusedMixer`."""

    def __init__(
        self, module: LatentAttention, pools: KvPools, attention: PagedGroups, ropes: RopeTables
    ) -> None:
        self._module = module
        self._group = pools.places[module.index].group
        self._pool, self._layer = pools.of_layer(module.index)
        self._attention = attention
        self._rope = ropes.of(module.own.rope, module.own.turned)

    @property
    def reader(self) -> Rounding | None:
        """See `FusedMixer`. Two products read the input; one rounding serves both, or each rounds
        for itself."""
        one, other = self._module.q.reads, self._module.kept.reads
        if one is None or other is None or one.scale is not None or other.scale is not None:
            return None
        return one if one.group == other.group else None

    @property
    def keeps(self) -> bool:
        """See `FusedMixer`."""
        return True

    def run(self, x: Tensor | Rounded, step: StepTokens) -> Tensor:
        """See `FusedMixer`."""
        return self._output(step.attend(self._module.index, *self._project(x, step)))

    def store(self, x: Tensor | Rounded, step: StepTokens) -> None:
        """See `FusedMixer`. q is left out."""
        self._keep(self._module.kept(x), None, step)

    def run_ends(self, x: Tensor | Rounded, step: StepTokens, ends: RowEnds) -> Tensor:
        """See `FusedMixer`."""
        q, _, _ = self._project(x, step)
        q = q.index_select(0, ends.tokens)
        return self._output(self._attention.attend_ends(self._module.index, q, ends.groups))

    def _output(self, attended: Tensor) -> Tensor:
        out: Tensor = self._module.output(attended.flatten(1))
        return out

    def _project(self, x: Tensor | Rounded, step: StepTokens) -> tuple[Tensor, Tensor, Tensor]:
        """q, K and V of the absorbed form. K is also stored in the pool."""
        module, own = self._module, self._module.own
        q, kept = self._queries(x), module.kept(x)
        self._keep(kept, q, step)
        k = kept[:, None]
        return q.view(len(q), -1, own.head_dim), k, k[..., : own.rank]

    def _keep(self, kept: Tensor, q: Tensor | None, step: StepTokens) -> None:
        to = step.positions, step.stores[self._group], self._pool, self._layer
        heads = 0 if q is None else q.shape[1] // self._module.own.head_dim
        latent_store(kept, q, self._module.kept_norm, self._rope, *to, heads)

    def _queries(self, x: Tensor | Rounded) -> Tensor:
        module = self._module
        q: Tensor = module.q(x)
        if module.q_norm is None or module.heads_of_q is None:
            return q
        norm, reader = module.q_norm, module.heads_of_q.reads
        normed: Tensor | Rounded = (
            kernels.rms_norm(q, norm.weight, norm.eps)
            if reader is None
            else rms_norm_rounded(q, norm.weight, norm.eps, reader)
        )
        made: Tensor = module.heads_of_q(normed)
        return made
