"""Checkpoints with `quant_method: fp8`. Two families share the name:

- AutoFP8 and vLLM: `weight`, one `weight_scale`, and `input_scale` if the scheme is static.
- DeepSeek and Qwen3: `weight` and `weight_scale_inv`, a scale for each 128 x 128, in spite of its
  name a factor. Inputs are rounded by groups of 128.
"""

from __future__ import annotations

from engine.model.precision.base import BLOCK
from engine.model.precision.formats.expressions import Expressions
from engine.model.precision.formats.layout import Fp8Layout, Layout, LayoutFormat, Scales
from engine.model.precision.formats.names import EMBEDDING, HEAD, is_skipped
from engine.model.precision.formats.settings import Settings


def read_fp8(settings: Settings) -> LayoutFormat:
    """The format of a description.

    Raises:
        UnsupportedModelError: something in it is not supported.
    """
    settings.one_of("fmt", ("e4m3", None))
    settings.one_of("scale_fmt", ("float", None))
    settings.absent("modules_to_convert", works="float embeddings are")
    blocks = settings.get("weight_block_size")
    if blocks not in (None, [BLOCK, BLOCK]):
        raise settings.refusal("weight_block_size", f"supported: [{BLOCK}, {BLOCK}] and none")
    quantised = _blocks(settings) if blocks else _tensors(settings)
    skipped = (HEAD, EMBEDDING, *settings.names("modules_to_not_convert", "ignored_layers"))
    expressions = Expressions()

    def layout(module: str) -> Layout | None:
        return None if is_skipped(module, skipped, expressions) else quantised

    return LayoutFormat("fp8 in blocks" if blocks else "fp8", layout)


def _blocks(settings: Settings) -> Layout:
    settings.one_of("activation_scheme", ("dynamic",), "dynamic")
    return Fp8Layout(Scales.BLOCK, scale_name="weight_scale_inv")


def _tensors(settings: Settings) -> Layout:
    scheme = settings.one_of("activation_scheme", ("static", "dynamic"), "dynamic")
    return Fp8Layout(Scales.TENSOR_OR_CHANNEL, static_input=scheme == "static")
