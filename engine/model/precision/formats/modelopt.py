"""Checkpoints of NVIDIA's ModelOpt in FP8.

They describe themselves in `quantization_config` of config.json (skipped modules under `ignore`),
or, older ones, in `quantization` of hf_quant_config.json (under `exclude_modules`).
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.model.precision.formats.layout import Fp8Layout, Layout, LayoutFormat, Scales
from engine.model.precision.formats.names import EMBEDDING, is_excluded
from engine.model.precision.formats.settings import Settings

LAYOUTS: dict[str, Layout] = {
    "fp8": Fp8Layout(Scales.TENSOR, static_input=True),
    "fp8_per_channel_per_token": Fp8Layout(Scales.CHANNEL),
}
"""By `quant_algo`."""


def read_modelopt(settings: Settings) -> LayoutFormat:
    """The format of a description.

    Raises:
        UnsupportedModelError: something in it is not supported.
    """
    if isinstance(settings.get("quantization"), Mapping):
        settings = settings.inner("quantization")
    algorithm = settings.one_of("quant_algo", tuple(LAYOUTS))
    settings.absent("quantized_layers", works="one quant_algo for all layers is")
    excluded = settings.names("exclude_modules", "ignore")

    def layout(module: str) -> Layout | None:
        is_float = module == EMBEDDING or is_excluded(module, excluded)
        return None if is_float else LAYOUTS[algorithm]

    return LayoutFormat(f"modelopt {algorithm}", layout)
