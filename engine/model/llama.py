"""The Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3.

The config has their differences (biases, norms on q and k, windows, rope, tied embeddings). The
three projections of attention are one weight, and so are gate and up, for one product each.

One of several ranks holds its part of the weights (`engine.model.shard`). Behind output and down
the ranks add up.

Shapes: T tokens of a step, H hidden size, Hq query heads, Hkv KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.attention import AttentionBackend
from engine.model.config import ModelConfig
from engine.model.precision.base import Kernels, Part, parameter
from engine.model.precision.choice import Precision
from engine.model.precision.packing import pack, product
from engine.model.precision.rounding import Rounded
from engine.model.shard import Shard
from engine.ranks.collective import Alone, Collective

ALL = Shard()
"""The whole model."""


class Rope(nn.Module):
    """Rotary position embedding (Su et al. 2021), with the halves in the layout of Hugging Face."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        super().__init__()
        self.scale = config.rope_scale
        self.frequencies = torch.tensor(config.rope_frequencies, device=device)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and sin, [T, 1, D] each."""
        angles = positions.float()[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [T, heads, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Linear(nn.Module):
    """A product with a weight, which is one or several modules of a checkpoint."""

    def __init__(
        self,
        parts: Sequence[Part],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        precision: Precision,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.method = precision.method(parts, parts[0].region.columns.size, device)
        outputs = sum(part.rows for part in parts)
        self.bias = parameter((outputs,), dtype, device) if bias else None

    def forward(self, x: Tensor | Rounded) -> Tensor:
        """[T, inputs] -> [T, outputs]."""
        return self.method.product(x, self.bias)


class RmsNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter((size,), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        """Normalises over the last dimension."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Layer(nn.Module):
    """Attention and a gated feed-forward, each with a norm before it and a residual around it."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        dtype: torch.dtype,
        device: torch.device,
        precision: Precision,
        shard: Shard,
        collective: Collective,
    ) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        heads, kv_heads = shard.heads(config).size, shard.kv_heads(config).size
        self.heads = (heads, kv_heads, kv_heads)
        self._collective = collective
        hidden, regions = config.hidden_size, shard.regions(config)

        def norm(size: int) -> RmsNorm:
            return RmsNorm(size, config.norm_eps, dtype, device)

        def linear(bias: bool, *names: str) -> Linear:
            parts = [Part(f"model.layers.{index}.{name}", regions[name]) for name in names]
            return Linear(parts, bias, dtype, device, precision)

        self.input_norm = norm(hidden)
        projections = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        self.qkv = linear(config.qkv_bias, *projections)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.output = linear(config.output_bias, "self_attn.o_proj")
        self.mlp_norm = norm(hidden)
        self.gate_up = linear(config.mlp_bias, "mlp.gate_proj", "mlp.up_proj")
        self.down = linear(config.mlp_bias, "mlp.down_proj")

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend) -> Tensor:
        """[T, H] -> [T, H]."""
        x = x + self._attend(self.input_norm(x), cos, sin, attention)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self._collective.all_reduce(self.down(F.silu(gate) * up))

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor, attention: AttentionBackend) -> Tensor:
        heads = self.qkv(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self._collective.all_reduce(self.output(attention(self.index, q, k, v).flatten(1)))


class Model(nn.Module):
    """The decoder. Weights are uninitialised until the loader has filled them."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        precision: Precision | None = None,
        shard: Shard = ALL,
        collective: Collective | None = None,
    ) -> None:
        super().__init__()
        precision = precision or Precision(device, dtype)
        self.config = config
        """Of the whole model."""
        self.shard = shard
        self.collective = collective or Alone()
        hidden = config.hidden_size
        self.embedding = parameter((config.vocab_size, hidden), dtype, device)
        self.rope = Rope(config, device)
        more = dtype, device, precision, shard, self.collective
        layers = [Layer(config, index, *more) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm(hidden, config.norm_eps, dtype, device)
        self.head = self._head(dtype, device)

    def _head(self, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        """Memory of the head's rows, which a tied one shares with the embedding."""
        rows = self.shard.vocab(self.config)
        if not self.config.tie_embeddings:
            return parameter((rows.size, self.config.hidden_size), dtype, device)
        if self.shard.count == 1:
            return self.embedding
        return nn.Parameter(self.embedding[rows.slice], requires_grad=False)

    @property
    def linears(self) -> list[Linear]:
        """All products of the layers, in the order in which a token meets them."""
        return [module for module in self.modules() if isinstance(module, Linear)]

    def finish(self, kernels: Kernels | None = None) -> None:
        """Makes the filled weights ready for products, one by one.

        On a CPU an embedding that is also the head is kept twice, because rows of a packed weight
        cannot be looked up.

        Args:
            kernels: products of the device; None: PyTorch's.
        """
        for linear in self.linears:
            linear.method.finish(kernels)
        if kernels is None:
            self.head = pack(self.head)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """[T] ids at [T] positions -> [T, H], after the last norm.

        `attention.begin` must have been called for this step.
        """
        x = F.embedding(token_ids, self.embedding)
        cos, sin = self.rope(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, vocab] float32 on rank 0; elsewhere this rank's part."""
        return self.collective.gather(product(hidden, self.head).float(), self.config.vocab_size)
