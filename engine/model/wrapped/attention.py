"""Attention of a class that is ours under another name: one product for q, k and v, and our rope.

What a module does is not read from its code. A small copy of it gets random weights, tokens and
angles, and what it asks of attention and answers is compared with ours. Angles stay the class's:
its own module computes them, once a step.

Shapes: T tokens, H hidden size, D head dimension, R numbers of a head that are rotated.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from engine.model.linear import Build, Linear
from engine.model.mixers.rope import rotate
from engine.model.places import Place, of_linear
from engine.model.precision.base import WeightSlice
from engine.model.region import Region
from engine.model.shard import Shard
from engine.model.wrapped import interfaces
from engine.model.wrapped.linears import set_module
from engine.model.wrapped.ranks import INPUTS, OUTPUTS, style_of
from engine.model.wrapped.recording import Attended
from engine.model.wrapped.tensors import Origin

QKV: Final = ("q_proj", "k_proj", "v_proj")
"""The three products before attention."""
_INPUTS: Final = 8
"""Hidden size of the copy."""
_TOKENS: Final = 3
_SCALES: Final = (1.0, 1e4)
"""Factors of the copy's inputs: who clips or caps on the way answers large ones otherwise."""
_ALIKE: Final = 1e-5
"""How near the answers are in float32, of inputs of about 1."""


class Triple(nn.Module):
    """Attention of ours in the place of a class's."""

    def __init__(
        self, call: Attended, names: Sequence[str], biases: tuple[bool, bool], build: Build
    ) -> None:
        """Makes its products, with memory that is not filled.

        Args:
            call: of the dry run.
            names: of its four products in a checkpoint: q, k, v and the output.
            biases: whether q, k and v have one, and whether the output has.
            build: what they are built with.
        """
        super().__init__()
        shard, dim, hidden = build.shard, call.head_dim, _products(call.module)[0].in_features
        sizes = (call.heads, call.kv_heads, call.kv_heads)
        held = [shard.even(heads) for heads in sizes]
        rows = [type(own)(own.start * dim, own.end * dim) for own in held]
        self.sizes = tuple(own.size for own in held)
        """Heads of this rank: q, k and v."""
        parts = [
            WeightSlice(name, Region.some_rows((heads * dim, hidden), own))
            for name, heads, own in zip(names, sizes, rows, strict=False)
        ]
        inputs = Region.some_columns((hidden, call.heads * dim), rows[0])
        self.qkv = Linear(parts, biases[0], build)
        self.output = Linear([WeightSlice(names[-1], inputs)], biases[1], build)
        self.calls: interfaces.Calls | None = None
        self._dim, self._collective = dim, build.collective

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """[1, T, H] and the angles' cos and sin, [1, T, R] each -> [1, T, H]."""
        assert self.calls is not None
        heads = self.qkv(hidden_states[0])
        read = self.calls.attend_unturned(heads, self.sizes, self._dim, position_embeddings)
        return self._collective.all_reduce(self.output(read.flatten(1)))[None], None

    def places(self, shard: Shard) -> Iterator[Place]:
        """The parts of its weights, in a fixed order."""
        yield from of_linear(self.qkv, None, shard)
        yield from of_linear(self.output, None, shard)


def replace(
    causal: nn.Module,
    body: str,
    calls: Sequence[Attended],
    origins: Mapping[str, Origin],
    plan: dict[str, str],
    build: Build,
) -> Counter[str]:
    """Puts ours into the body of a model.

    Args:
        causal: of transformers, on the device `meta`, with products of its own.
        body: name of its body.
        calls: of its dry run.
        origins: of its parameters; what a checkpoint has under other names stays as it is.
        plan: how ranks share it (`engine.model.wrapped.ranks`).
        build: what ours are built with.

    Returns:
        How many of each class were replaced.
    """
    found: Counter[str] = Counter()
    names = {id(module): name for name, module in causal.named_modules()}
    times = Counter(id(call.module) for call in calls)
    turned = _turned(causal.get_submodule(body))
    for call in calls:
        module, full = call.module, names[id(call.module)]
        if times[id(module)] > 1 or not full.startswith(f"{body}.") or turned is None:
            continue
        if (own := _own(full, call, origins, plan)) is None or not _alike(call, turned):
            continue
        set_module(causal, full, Triple(call, own.names, own.biases, build))
        found[type(module).__name__] += 1
    return found


class _Own(NamedTuple):
    names: list[str]
    """Names of the four products in a checkpoint."""
    biases: tuple[bool, bool]


def _output(module: nn.Module) -> str:
    """Name of the product behind attention; empty: there are several, or none."""
    found = [
        name
        for name, each in module.named_children()
        if type(each) is nn.Linear and name not in QKV
    ]
    return found[0] if len(found) == 1 else ""


def _products(module: nn.Module) -> list[Any]:
    return [getattr(module, name, None) for name in (*QKV, _output(module) or "-")]


def _own(
    full: str, call: Attended, origins: Mapping[str, Origin], plan: dict[str, str]
) -> _Own | None:
    """What ours would read of a checkpoint; None: it has something else than four products."""
    module, dim = call.module, call.head_dim
    products = _products(module)
    if call.sinks or not all(type(each) is nn.Linear for each in products):
        return None
    sizes = [(each.out_features, each.in_features) for each in products]
    (q, hidden), (k, _), (v, _), (_, last) = sizes
    if (q, k, v, last) != (call.heads * dim, call.kv_heads * dim, call.kv_heads * dim, q):
        return None
    if sizes[-1] != (hidden, q) or list(module.buffers()):
        return None
    biases = [each.bias is not None for each in products]
    own = {
        f"{name}.{kind}"
        for name, bias in zip((*QKV, _output(module)), biases, strict=True)
        for kind in ("weight", "bias")[: 1 + bias]
    }
    if {name for name, _ in module.named_parameters()} != own or len(set(biases[:3])) > 1:
        return None
    targets = [f"{full}.{name}" for name in own]
    if any(each not in origins or origins[each].conversion is not None for each in targets):
        return None
    styles = [style_of(plan, f"{full}.{name}") for name in (*QKV, _output(module))]
    if plan and styles != [OUTPUTS, OUTPUTS, OUTPUTS, INPUTS]:
        return None
    names = [
        origins[f"{full}.{name}.weight"].names[0].removesuffix(".weight")
        for name in (*QKV, _output(module))
    ]
    return _Own(names, (biases[0], biases[3]))


# -- what they do -------------------------------------------------------------------------------


def _turned(body: nn.Module) -> int | None:
    """R of the body's own module of angles, of which cos and sin have all pairs twice; None: it
    has none, several, or others."""
    found = [each for each in body.modules() if isinstance(getattr(each, "inv_freq", None), Tensor)]
    if len(found) != 1:
        return None
    probe: Any = copy.deepcopy(found[0]).to_empty(device="cpu").float()
    pairs = len(probe.inv_freq)
    probe.inv_freq.copy_(torch.rand(pairs, generator=torch.Generator().manual_seed(0)))
    try:
        both = probe(torch.zeros(1, _TOKENS, 1), torch.arange(_TOKENS)[None] + 1)
        cos, sin = both
        same = all(
            each.shape == (1, _TOKENS, 2 * pairs) and torch.equal(*each.chunk(2, dim=-1))
            for each in (cos, sin)
        )
    except Exception:  # Of any kind: it wants something else than positions.
        return None
    return 2 * pairs if same else None


class _Heard:
    """A recorder of one call, which answers with random numbers."""

    def __init__(self, answer: Tensor) -> None:
        self.heads: tuple[Tensor, Tensor, Tensor] | None = None
        self._answer = answer

    def attended(self, _: nn.Module, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> Tensor:
        """See `Recorder`."""
        self.heads = q, k, v
        return self._answer

    def masked(self, allows: Any, shape: tuple[int, int, int, int]) -> Tensor:
        """See `Recorder`. Modules make no masks."""
        raise AssertionError(allows, shape)


@cache
def _draw() -> torch.Generator:
    return torch.Generator()


@torch.inference_mode()
def _alike(call: Attended, turned: int) -> bool:
    """Whether a copy of the module does what ours does."""
    module, dim, draw = call.module, call.head_dim, _draw().manual_seed(0)
    taken = list(inspect.signature(module.forward).parameters)
    if taken[:2] != ["hidden_states", "position_embeddings"] or turned > dim:
        return False
    probe: Any = copy.copy(module)
    probe._modules = dict(module._modules)
    outputs = [call.heads * dim, call.kv_heads * dim, call.kv_heads * dim, _INPUTS]
    products = []
    for name, rows in zip((*QKV, _output(module)), outputs, strict=True):
        product = nn.Linear(outputs[0] if rows == _INPUTS else _INPUTS, rows, bias=False)
        product.weight.copy_(torch.randn(product.weight.shape, generator=draw))
        probe._modules[name] = product
        products.append(product)
    x = torch.randn(1, _TOKENS, _INPUTS, generator=draw)
    cos, sin = torch.randn(2, 1, _TOKENS, turned, generator=draw)
    answer = torch.randn(1, _TOKENS, call.heads, dim, generator=draw)
    positions = torch.arange(_TOKENS)[None] + (1 << 17)
    for scale in _SCALES:
        heard = _Heard(answer * scale)
        token = interfaces.recorder.set(heard)
        try:
            options = {"attention_mask": None, "position_ids": positions}
            out = probe(hidden_states=x * scale, position_embeddings=(cos, sin), **options)
        except Exception:  # Of any kind: it wants something else.
            return False
        finally:
            interfaces.recorder.reset(token)
        if heard.heads is None or not isinstance(out, tuple) or out[1:] != (None,):
            return False
        q, k, v = (product(x[0] * scale).view(_TOKENS, -1, dim) for product in products[:3])
        turn = cos[0][:, None], sin[0][:, None]
        wanted = [rotate(q, *turn), rotate(k, *turn), v, products[3]((answer * scale).flatten(2))]
        found = [*(each[0].transpose(0, 1) for each in heard.heads), out[0]]
        if not all(_near(*each, scale) for each in zip(found, wanted, strict=True)):
            return False
    return True


def _near(found: Tensor, want: Tensor, scale: float) -> bool:
    return found.shape == want.shape and torch.allclose(found, want, _ALIKE, _ALIKE * scale * 10)
