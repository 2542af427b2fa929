"""A transformers model that rounds as a quantised engine does, and the engine's own rounded inputs.

1. `watch` notes what an engine's products round their inputs to, by module.
2. `Reference` is the float model with dequantised weights. A hook before each quantised product
   rounds its input, by arithmetic of its own: none of the engine's code is used.
3. Float32 sums differ in their last bits, so now and then an input lies on the other side of the
   middle between two e4m3 numbers: it *flips*. A reference that follows an engine counts these
   flips, measures how far from such a middle each is, and goes on with the engine's numbers and
   scales. So one flip does not become many, and logits can be compared behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from engine.model.decoder import Model
from engine.model.linear import Linear

MOST = 448.0
LEAST_SCALE = 1e-12
MANTISSA_BITS = 3
LEAST_EXPONENT = -6
MOST_FLIPS = 1e-4
TIE = 1e-5
"""How far from the middle of two numbers a flip may be, in parts of its row's largest. Up to 3e-6
was seen in tiny models, and 1.4e-6 in SmolLM2."""
SCALES = 1e-4
"""By how much scales may differ, in parts of them. That is more than `TIE`: what all numbers of a
row share, as an exponential of attention does, is in its scale and in no quotient. SmolLM2's
layers 9 to 11 make 1e-5 of the first token's noise of 1e-6, since terms of its sums cancel. A pass
in float64 found the engine as far from it as transformers."""


class Rule(NamedTuple):
    """How a product's input is rounded: each row by a scale of its own, unless a field says
    otherwise."""

    scale: float | None = None
    group: int | None = None


class Input(NamedTuple):
    """Inputs of one product."""

    values: np.ndarray
    """[T, K] float64, numbers of e4m3."""
    scales: np.ndarray
    """[T, 1] or [T, K / group] float32."""

    @property
    def restored(self) -> np.ndarray:
        """[T, K] float64."""
        scales = self.scales.astype(np.float64)
        return self.values * scales.repeat(self.values.shape[1] // scales.shape[1], 1)


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest numbers of e4m3, ties to even, float64."""
    values = values.astype(np.float64)
    step = step_of(values)
    return np.clip(np.round(values / step) * step, -MOST, MOST)


def step_of(values: np.ndarray) -> np.ndarray:
    """The distance of neighbours in e4m3 around each value."""
    exponents = np.frexp(values)[1] - 1
    return np.ldexp(1.0, np.maximum(exponents, LEAST_EXPONENT) - MANTISSA_BITS)


def rounded(x: np.ndarray, rule: Rule) -> tuple[Input, np.ndarray]:
    """Rounds [T, K] float32. Also the quotients before they are rounded, [T, K] float32."""
    group = rule.group or x.shape[1]
    parts = x.reshape(len(x), -1, group)
    if rule.scale is None:
        scales = np.abs(parts).max(2, keepdims=True) / np.float32(MOST)
        scales = np.maximum(scales, np.float32(LEAST_SCALE))
    else:
        scales = np.full((len(x), 1, 1), rule.scale, np.float32)
    quotients = (parts / scales).reshape(x.shape)
    return Input(to_e4m3(quotients), scales[:, :, 0]), quotients


def edge(numbers: np.ndarray, towards: np.ndarray) -> np.ndarray:
    """Where values stop to round to these numbers of e4m3, on the side of `towards`."""
    steps = step_of(np.nextafter(numbers, towards))
    return numbers + np.sign(towards - numbers) * steps / 2


def by_channel(weight: Tensor) -> Tensor:
    """The weight that `quantization="fp8"` makes of [N, K], float32."""
    found, _ = rounded(weight.float().numpy(), Rule())
    return torch.from_numpy(found.restored).float()


@dataclass
class Flips:
    """Rounded inputs on which an engine and its reference disagree."""

    count: int = 0
    of: int = 0
    worst: float = 0.0
    """How far the farthest was from values that round to the engine's number, in parts of its row's
    largest."""
    missing: list[str] = field(default_factory=list)
    """Modules whose inputs the engine did not round."""

    @property
    def share(self) -> float:
        return self.count / max(1, self.of)

    def __str__(self) -> str:
        return f"{self.count} flips of {self.of:,} ({self.share:.1e}), {self.worst:.1e} off a tie"


Inputs = Mapping[str, Input]
"""Of an engine's products, by module."""


@contextmanager
def watch(*models: Model) -> Iterator[dict[str, Input]]:
    """What the products inside round their inputs to, of one sequence, by position. It may be
    computed by several models; a position that is computed again counts as it was last. Filled when
    the block ends."""
    notes: defaultdict[str, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
    inputs: dict[str, Input] = {}
    hooks = [hook for model in models for hook in _hooks(model, notes)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
    for module, steps in notes.items():
        positions, values, scales = (
            torch.cat(each[::-1]).numpy() for each in zip(*steps, strict=True)
        )
        found, last = np.unique(positions, return_index=True)
        assert found.tolist() == list(range(len(found))), "a position is missing"
        inputs[module] = Input(values[last].astype(np.float64), scales[last])


def _hooks(model: Model, notes: defaultdict[str, list[tuple[Tensor, Tensor, Tensor]]]) -> Any:
    at = [torch.empty(0)]

    def note_positions(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        at[0] = arguments[1].clone()

    def note(linear: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(linear, Linear)
        (x,) = arguments
        if isinstance(x, Tensor):
            if linear.method.input is None:
                return
            x = linear.method.input(x)
        for part in linear.parts:
            notes[part.module].append((at[0], x.values.float(), x.scales))

    yield model.register_forward_pre_hook(note_positions)
    for linear in model.linears:
        yield linear.register_forward_pre_hook(note)


class Reference:
    """A float model whose products have rounded weights and inputs."""

    def __init__(
        self, path: Path, weights: Mapping[str, Tensor] | str, rule: Callable[[str], Rule | None]
    ) -> None:
        """Loads the model.

        Args:
            path: folder of the float checkpoint.
            weights: the rounded weights by module; "fp8": what that quantization makes of them.
            rule: how the input of a module is rounded; None: not at all.
        """
        from transformers import AutoModelForCausalLM

        load = AutoModelForCausalLM.from_pretrained
        self.model = load(path, dtype=torch.float32, attn_implementation="eager")
        self.flips = Flips()
        self._followed: Inputs | None = None
        for name, module in self.model.named_modules():
            if not (isinstance(module, nn.Linear) and name.startswith("model.layers.")):
                continue
            if weights == "fp8" and rule(name) is not None:
                module.weight.data = by_channel(module.weight.data)
            elif isinstance(weights, Mapping) and name in weights:
                module.weight.data = weights[name].float()
            if (way := rule(name)) is not None:
                module.register_forward_pre_hook(self._hook(name, way))

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], followed: Inputs | None = None) -> Tensor:
        """[T, vocab] float32.

        Args:
            ids: the tokens.
            followed: an engine's rounded inputs for the same tokens, and perhaps for more. Flips
                are counted, and at a flip its number is taken.
        """
        self.flips = Flips()
        self._followed = None
        if followed is not None:
            self._followed = {name: _first(each, len(ids)) for name, each in followed.items()}
        try:
            logits: Tensor = self.model(torch.tensor([list(ids)])).logits[0].float()
        finally:
            self._followed = None
        return logits

    def _hook(self, name: str, rule: Rule) -> Any:
        def round_it(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
            (x,) = arguments
            rows = x.reshape(-1, x.shape[-1]).numpy()
            found, quotients = rounded(rows, rule)
            if self._followed is not None:
                found = self._follow(name, found, quotients)
            return (torch.from_numpy(found.restored).float().view(x.shape),)

        return round_it

    def _follow(self, name: str, found: Input, quotients: np.ndarray) -> Input:
        assert self._followed is not None
        flips = self.flips
        flips.of += found.values.size
        theirs = self._followed.get(name)
        if theirs is None:
            flips.missing.append(name)
            return found
        np.testing.assert_allclose(theirs.scales, found.scales, rtol=SCALES, err_msg=name)
        differ = theirs.values != found.values
        if differ.any():
            own, numbers = quotients[differ].astype(np.float64), theirs.values[differ]
            largest = np.abs(quotients).max(1, keepdims=True)
            off = np.abs(own - edge(numbers, own)) / np.broadcast_to(largest, differ.shape)[differ]
            flips.count += len(off)
            flips.worst = max(flips.worst, float(off.max()))
        return theirs


def _first(inputs: Input, rows: int) -> Input:
    return Input(inputs.values[:rows], inputs.scales[:rows])


def modules_of(model: Model) -> list[str]:
    """All modules of an engine's products."""
    return [part.module for linear in model.linears for part in linear.parts]
