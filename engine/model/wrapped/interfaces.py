"""The names under which transformers' code finds our attention and experts.

A class asks transformers' tables for the function of its config's implementation. Each module that
attends has `Calls`, which count the calls of a step: the n-th call is the n-th layer to the rest of
the engine.

Shapes: T tokens of a step, D numbers of a head of q and k, V of v.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.mixers.rope import rotate
from engine.step.attention import StepAttention

RUN: Final = "baton"
"""Name of our attention, and of our experts, in configs of transformers."""
RECORDED: Final = "baton-recorded"
"""Name of what stands for them in the dry run."""
CALLS: Final = "baton_calls"
"""Attribute of modules that attend."""


class Recorder(Protocol):
    """Hears of the calls of a dry run."""

    def attended(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """A module attends, with tensors [1, heads, T, D] -> [1, T, heads, V]."""
        ...

    def masked(self, allows: Any, shape: tuple[int, int, int, int]) -> Tensor:
        """A mask is made. `allows` says of positions whether they see each other."""
        ...


recorder: ContextVar[Recorder] = ContextVar("recorder")
"""The one of the dry run that runs."""


@runtime_checkable
class Turns(Protocol):
    """Attention of a step that rotates q and k itself."""

    def unturned(self, layer: int, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[T, (Hq + 2 Hkv) * D], and cos and sin [1, T, R] -> [T, Hq, D]."""
        ...


class Calls:
    """Calls of attention of a step, in order."""

    def __init__(self) -> None:
        self._attention: StepAttention | None = None
        self._next = 0

    def begin(self, attention: StepAttention) -> None:
        """The next call is the first one of a step."""
        self._attention, self._next = attention, 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[1, heads, T, D] -> [1, T, heads, V]. Pages have as much room for V as for K, so the
        narrower one is filled with zeros."""
        attention, layer = self._begun()
        q, k, v = (each[0].transpose(0, 1) for each in (q, k, v))
        values, width = v.shape[-1], max(k.shape[-1], v.shape[-1])
        q, k, v = (_widened(each, width) for each in (q, k, v))
        return attention(layer, q.contiguous(), k, v)[None, ..., :values]

    def attend_unturned(
        self, heads: Tensor, sizes: Sequence[int], dim: int, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """[T, all heads * D] of q, k and v, and cos and sin [1, T, R] -> [T, heads of q, D]."""
        attention, layer = self._begun()
        if isinstance(attention, Turns):
            return attention.unturned(layer, heads, *angles)
        cos, sin = (each[0][:, None] for each in angles)
        q, k, v = torch.split(heads.view(len(heads), -1, dim), list(sizes), dim=1)
        return attention(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)

    def _begun(self) -> tuple[StepAttention, int]:
        assert self._attention is not None, "a step has begun"
        layer, self._next = self._next, self._next + 1
        return self._attention, layer


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    calls = getattr(module, CALLS)
    assert isinstance(calls, Calls)
    return calls.attend(query, key, value), None


def _attend_recorded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    return recorder.get().attended(module, query, key, value, attention_mask, options), None


def _mask_recorded(
    *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_: Any
) -> Tensor:
    return recorder.get().masked(mask_function, (batch_size, 1, q_length, kv_length))


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """On a GPU one grouped product, which a graph can hold; on a CPU one expert after the other, as
    a grouped product of few rows is slow there."""
    if hidden.device.type != "cpu":
        from transformers.integrations.moe import grouped_mm_experts_forward

        out: Tensor = grouped_mm_experts_forward(module, hidden, chosen, weights)
        return out
    total = torch.zeros_like(hidden)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, place = torch.where(chosen == expert)
        made = _of_expert(module, hidden[tokens], expert)
        total.index_add_(0, tokens, (made * weights[tokens, place, None]).to(total.dtype))
    return total


def _of_expert(module: Any, x: Tensor, expert: int) -> Tensor:
    """[N, H] -> [N, H]."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    x = _product(module, name, x, expert)
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    x = _product(module, "down_proj", x, expert)
    return module.post_expert_norm(x) if module.has_post_expert_norm else x


def _product(module: Any, name: str, x: Tensor, expert: int) -> Tensor:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return F.linear(x, weight.T if module.is_transposed else weight, bias)


def _experts_recorded(_module: Any, hidden: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(hidden)


def register() -> None:
    """Registers the names with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(RUN, _attend)
    AttentionInterface.register(RECORDED, _attend_recorded)
    AttentionMaskInterface.register(RECORDED, _mask_recorded)
    ALL_EXPERTS_FUNCTIONS.register(RUN, _experts)
    ALL_EXPERTS_FUNCTIONS.register(RECORDED, _experts_recorded)


def use(model: nn.Module, name: str) -> None:
    """Lets all parts of a model of transformers ask for this name. It goes around transformers'
    own setters: they take what they know for a GPU."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation_internal = name
            config._experts_implementation_internal = name
