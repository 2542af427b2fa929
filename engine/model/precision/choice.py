"""Chooses the method of each `Linear`, by its parts' schemes, its shape and the device."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from engine.model.config import UnsupportedModelError
from engine.model.precision.base import BLOCK, Format, Kind, Method, Scheme, WeightSlice
from engine.model.precision.dense import Dense
from engine.model.precision.fp8 import LEAST_CAPABILITY, Fp8Blocks, Fp8Channels
from engine.model.precision.int4 import INT4_MULTIPLE, Int4, int4_obstacle, takes

log = logging.getLogger("baton.engine")

QUANTIZATIONS = ("", "fp8")
"""What float weights can be rounded to while they are loaded; "": nothing."""
FP8_MULTIPLE = 16
"""FP8 products take only multiples of it, in both directions."""


class Precision:
    """The precision of a model's weights."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        form: Format | None = None,
        quantization: str = "",
    ) -> None:
        """What the weights of a model become.

        Args:
            device: the device that computes with them.
            dtype: the model's dtype.
            form: the format of a quantised checkpoint.
            quantization: one of `QUANTIZATIONS`, for a float checkpoint.

        Raises:
            UnsupportedModelError: the checkpoint is quantised already, the quantization is unknown,
                or the device cannot compute with it.
        """
        if quantization not in QUANTIZATIONS:
            names = ", ".join(filter(None, QUANTIZATIONS))
            raise UnsupportedModelError(f"quantization {quantization!r} is unknown; known: {names}")
        if form is not None and quantization:
            raise UnsupportedModelError(
                f"quantization {quantization}: the checkpoint is quantised already, as {form.name};"
                " leave the setting out"
            )
        self.form = form
        self.name = form.name if form else quantization and f"{quantization} (rounded on load)"
        """Name for people and fingerprints; empty: float."""
        self._rounds = Scheme(Kind.FP8_CHANNELS) if quantization == "fp8" else None
        self._device = device
        self._dtype = dtype
        self._widened: defaultdict[str, set[str]] = defaultdict(set)
        """Modules by the reason why they are widened."""

    def method(self, parts: Sequence[WeightSlice], inputs: int, device: torch.device) -> Method:
        """The method of a `Linear` of these parts, with memory on `device`."""
        outputs = sum(part.rows for part in parts)
        schemes = {self._scheme(part.module) for part in parts}
        scheme = schemes.pop()
        if schemes:
            return self._widen(parts, "its parts are kept in different ways", inputs, device)
        if scheme is None:
            return Dense(outputs, inputs, self._dtype, device)
        if obstacle := self._obstacle(scheme, parts):
            return self._widen(parts, obstacle, inputs, device)
        on_gpu = self.on_gpu
        match scheme.kind:
            case Kind.FP8_CHANNELS:
                return Fp8Channels(
                    outputs,
                    inputs,
                    self._dtype,
                    device,
                    on_gpu=on_gpu,
                    static_input=scheme.static_input,
                )
            case Kind.FP8_BLOCKS:
                return Fp8Blocks(outputs, inputs, self._dtype, device, on_gpu=on_gpu)
            case Kind.INT4 if on_gpu:
                return Int4(scheme, parts, inputs, self._dtype, device)
            case Kind.INT4 | Kind.MXFP4:
                return Dense(outputs, inputs, self._dtype, device)

    def of_experts(self, parts: Sequence[WeightSlice]) -> Scheme | None:
        """The scheme in which a GPU keeps the weights of all experts in one tensor; None: in the
        model's dtype.

        Args:
            parts: of all experts.
        """
        schemes = {self._scheme(part.module) for part in parts}
        scheme = schemes.pop()
        obstacle = "experts are kept in different ways" if schemes else ""
        if scheme is None and not obstacle:
            return None
        if scheme is not None and not obstacle:
            obstacle = self._obstacle_of_experts(scheme, parts)
        if obstacle:
            self._widened[obstacle].update(part.module for part in parts)
            return None
        return scheme

    def _obstacle_of_experts(self, scheme: Scheme, parts: Sequence[WeightSlice]) -> str:
        """Why our kernels take no such weights; empty: they do."""
        if scheme.kind not in (Kind.INT4, Kind.MXFP4):
            return self._obstacle(scheme, parts)
        if scheme.group % INT4_MULTIPLE:
            return f"groups of {scheme.group} are no multiple of {INT4_MULTIPLE}"
        if any(part.region.shape[1] % INT4_MULTIPLE for part in parts):
            return f"its inputs are no multiple of {INT4_MULTIPLE}"
        return ""

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU computes."""
        return self._device.type == "cuda"

    def units(self, part: WeightSlice) -> tuple[int, int]:
        """Rows and columns of a module's weight that no boundary between ranks may cut."""
        scheme = self._scheme(part.module)
        if scheme is None:
            return 1, 1
        outputs, inputs = part.region.shape
        if scheme.kind is Kind.MXFP4:
            return 1, scheme.group
        if scheme.kind is Kind.FP8_BLOCKS:
            return BLOCK, BLOCK
        if scheme.kind is Kind.FP8_CHANNELS:
            is_widened = scheme.float_input or outputs % FP8_MULTIPLE or inputs % FP8_MULTIPLE
            return (1, 1) if is_widened else (FP8_MULTIPLE, FP8_MULTIPLE)
        return self._int4_units(scheme)

    def _int4_units(self, scheme: Scheme) -> tuple[int, int]:
        if not self.on_gpu:
            return 1, scheme.group or 1
        return INT4_MULTIPLE, math.lcm(scheme.group or 1, INT4_MULTIPLE)

    def log_widened(self) -> None:
        """Names the modules that are widened to the model's dtype, and why."""
        for reason, modules in self._widened.items():
            log.warning(
                "widened to the model's dtype: %s",
                reason,
                extra={"modules": sorted(modules), "count": len(modules)},
            )
        self._widened.clear()

    def _scheme(self, module: str) -> Scheme | None:
        return self.form.scheme(module) if self.form else self._rounds

    def _obstacle(self, scheme: Scheme, parts: Sequence[WeightSlice]) -> str:
        """Why no product takes such a weight; empty: one does. Only whole weights count, so it does
        not depend on the number of ranks."""
        if scheme.kind is Kind.INT4:
            return self._int4_obstacle(scheme, parts)
        if scheme.kind is Kind.MXFP4:  # Only experts have it in checkpoints.
            return "a dense product in MXFP4 is not built" if self.on_gpu else ""
        self._refuse_old_gpu()
        if scheme.float_input:
            return "its input is not rounded, and FP8 products take FP8 inputs only"
        multiple = BLOCK if scheme.kind is Kind.FP8_BLOCKS else FP8_MULTIPLE
        if any(size % multiple for part in parts for size in part.region.shape):
            return f"its shape is no multiple of {multiple}"
        return ""

    def _int4_obstacle(self, scheme: Scheme, parts: Sequence[WeightSlice]) -> str:
        if not self.on_gpu:
            return ""
        if obstacle := int4_obstacle(self._device):
            raise UnsupportedModelError(f"{self.name} weights: {obstacle}")
        shape = sum(part.region.shape[0] for part in parts), parts[0].region.shape[1]
        if takes(shape, scheme.group, self._dtype):
            return ""
        return f"no INT4 kernel takes weights of {shape} in groups of {scheme.group or shape[1]}"

    def _refuse_old_gpu(self) -> None:
        if not self.on_gpu:
            return
        capability = torch.cuda.get_device_capability(self._device)
        if capability < LEAST_CAPABILITY:
            have, least = (".".join(map(str, each)) for each in (capability, LEAST_CAPABILITY))
            raise UnsupportedModelError(
                f"{self.name} weights need a GPU of compute capability {least} or more (Ada,"
                f" Hopper); this one has {have}: take a checkpoint without FP8"
            )

    def _widen(
        self, parts: Sequence[WeightSlice], reason: str, inputs: int, device: torch.device
    ) -> Method:
        self._widened[reason].update(part.module for part in parts)
        return Dense(sum(part.rows for part in parts), inputs, self._dtype, device)
