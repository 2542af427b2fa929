"""INT4 weights: 0 to 15, with a scale (and a zero point) for each group of inputs of a channel.

    weight = (value - zero point) * scale

On a CPU the weight is dequantised when it is loaded. On a GPU it stays in four bits, and the
kernels of `humming-kernels` multiply it with activations in the model's dtype
(`precision.humming`). They turn a group's values into that dtype, scale included, and add in
float32. So their result is that of the dequantised weight, but for one thing: where several blocks
share a tile of the result, each adds its part to the tile in the model's dtype, in the order in
which they end. The same input may then give results that differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model.precision import humming
from engine.model.precision.base import Kernels, Method, Quantised, Scheme, WeightSlice
from engine.model.precision.humming import LOCKS, Progress, first_rows
from engine.model.precision.rounding import Rounded

MIDDLE = 8
"""The zero point of a weight that has none of its own."""
MOST = 7
GROUPS = (0, 32, 64, 128, 256)
"""Inputs of a group that the kernels take. 0: all inputs of a channel."""
INT4_MULTIPLE = 32
"""The kernels take only multiples of it, in both directions."""
DTYPES = (torch.bfloat16, torch.float16)
int4_obstacle = humming.obstacle


def takes(shape: tuple[int, int], group: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the kernels take a weight of this shape [N, K], with or without zero points.

    Args:
        shape: of the whole weight; of a fused one, of all its parts together.
        group: inputs of a group; 0: all of a channel.
        dtype: of the activations.
    """
    n, k = shape
    if group not in GROUPS or dtype not in DTYPES:
        return False
    fits = n % INT4_MULTIPLE == 0 and k % INT4_MULTIPLE == 0
    return fits and (group == 0 or k % group == 0)


def dequantised(part: Quantised) -> Tensor:
    """The weight in float32, [N, K]. The group follows from the shape of the scales."""
    values = part.values.float().view(*part.scales.shape, -1)
    if part.zero_points is None:
        values -= MIDDLE
    else:
        values -= part.zero_points.float()[:, :, None]
    values *= part.scales.float()[:, :, None]
    return values.view(part.values.shape)


def quantised(weight: Tensor, group: int, dtype: torch.dtype) -> Quantised:
    """Rounds a float weight [N, K] to the nearest of -7 to 7 scales, for dummy weights and tests.

    A scale is the largest magnitude of its group divided by 7, in `dtype`.
    """
    groups = weight.float().reshape(len(weight), -1, group or weight.shape[1])
    least = torch.finfo(dtype).tiny
    scales = (groups.abs().amax(2) / MOST).clamp_min(least).to(dtype).float()
    values = (groups / scales[:, :, None]).round_().clamp_(-MOST, MOST) + MIDDLE
    return Quantised(values.flatten(1).to(torch.uint8), scales)


def pack_pairs(values: Tensor) -> Tensor:
    """[N, K] uint8 of 0 to 15 -> [N, K / 2], the first of each pair low."""
    packed = values[:, 1::2] << 4
    packed |= values[:, 0::2]
    return packed


class Int4(Method):
    """An INT4 weight on a GPU, multiplied by humming-kernels.

    It needs its kernels: `compile_all`.

    Memory: K / 2 bytes of values for a channel and 2 for each group; zero points take one byte for
    a group before `finish`, and half of one after it.
    """

    values: Tensor
    scales: Tensor
    zero_points: Tensor | None
    locks: Tensor

    def __init__(
        self,
        scheme: Scheme,
        parts: Sequence[WeightSlice],
        inputs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        rows = sum(part.rows for part in parts)
        self.inputs, self.group = inputs, scheme.group
        shape = rows, inputs // (scheme.group or inputs)
        self._keep("values", torch.empty(rows, inputs // 2, dtype=torch.uint8, device=device))
        self._keep("scales", torch.empty(shape, dtype=dtype, device=device))
        self._keep("zero_points", None)
        self._keep("locks", torch.zeros(LOCKS, dtype=torch.int32, device=device))
        self.config = ""
        """How the library describes the finished weight. Equal ones share kernels."""
        self.table: Tensor | None = None
        """The kernels, once they are compiled."""

    def _keep(self, name: str, tensor: Tensor | None) -> None:
        self.register_buffer(name, tensor, persistent=False)

    def fill(self, first_row: int, part: Tensor | Quantised) -> None:
        """Takes the rows of the weight from `first_row` on. INT4 rows are kept as they are, but for
        scales, which are rounded to the model's dtype."""
        device, dtype = self.values.device, self.scales.dtype
        if isinstance(part, Tensor):
            part = quantised(part.to(device), self.group, dtype)
        rows = slice(first_row, first_row + len(part.values))
        self.values[rows] = pack_pairs(part.values.to(device))
        self.scales[rows] = part.scales.to(device, dtype)
        if part.zero_points is not None:
            if self.zero_points is None:
                shape = self.scales.shape
                self.zero_points = torch.full(shape, MIDDLE, dtype=torch.uint8, device=device)
            self.zero_points[rows] = part.zero_points.to(device)

    def finish(self, kernels: Kernels | None = None) -> None:
        """Puts the weight into the order of the kernels. Zero points that are all 8 are left out:
        the kernels without them are faster. A second call does nothing."""
        if self.config:
            return
        zero_points, device = self.zero_points, self.values.device
        if zero_points is not None and bool((zero_points == MIDDLE).all()):
            zero_points = None
        stored = humming.stored(self.values, self.scales, zero_points, device)
        self.config, self.values, self.scales, self.zero_points = stored

    def product(self, x: Tensor | Rounded, bias: Tensor | None) -> Tensor:
        """[T, K] in the model's dtype -> [T, N].

        Raises:
            RuntimeError: the kernels were not compiled.
        """
        if self.table is None:
            raise RuntimeError("the INT4 kernels are not compiled: compile_all")
        assert isinstance(x, Tensor)
        weight = self.values, self.scales, self.zero_points
        out = humming.product(x, *weight, self.locks, self.table)
        return out if bias is None else out.add_(bias)


@torch.inference_mode()
def compile_all(model: nn.Module, most_rows: int, progress: Progress | None = None) -> None:
    """Finishes all INT4 weights of a model, and compiles and loads their kernels, for steps of 1 to
    `most_rows` rows. After it no product compiles or loads anything, so graphs may be captured.

    Without INT4 weights it does nothing. Blocks until all is done.

    Args:
        model: a model whose weights are filled.
        most_rows: the most rows that a product has.
        progress: called with ("int4 kernels", kernels done, kernels in all).

    Raises:
        ModelError: a kernel does not compile.
    """
    methods = [module for module in model.modules() if isinstance(module, Int4)]
    if not methods:
        return
    for method in methods:
        method.finish()
    by_config = {method.config: method for method in methods}
    device = methods[0].values.device
    tables = humming.compiled(list(by_config), most_rows, device, progress)
    for method in methods:
        method.table = tables[method.config]
    for method in by_config.values():
        _load(method, tables[method.config])
    torch.cuda.synchronize(device)


def _load(method: Int4, table: Tensor) -> None:
    """Runs each kernel once: its first launch loads it, which a capture may not do."""
    dtype, device = method.scales.dtype, method.values.device
    for rows in first_rows(table):
        method.product(torch.zeros(rows, method.inputs, dtype=dtype, device=device), None)
