"""What weights the formats of quantised checkpoints read, against the libraries and formulas."""

from __future__ import annotations

import math

import pytest
import torch
from quantised_checkpoints import FORMS, INPUT_SCALE, Checkpoint, quantised

from engine.model import ModelError, UnsupportedModelError
from engine.model.precision.base import Format, Get, Kind, Quantised
from engine.model.precision.formats import read_format
from engine.model.precision.formats.packing import unpacked
from engine.model.region import Range, Region

MODULE = "model.layers.0.self_attn.q_proj"
SHAPES = {MODULE: (144, 160), "model.layers.0.mlp.down_proj": (160, 288)}
WHOLE = Region.whole(*SHAPES[MODULE])
COMPRESSED = [form for form in FORMS if form.startswith(("compressed", "pack"))]


def reader(tensors: dict[str, torch.Tensor]) -> Get:
    """Reads tensors, or parts of them, as from a file."""

    def get(name: str, *where: Range) -> torch.Tensor:
        return tensors[name][tuple(each.slice for each in where)] if where else tensors[name]

    return get


def float_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"{module}.weight": torch.randn(shape, generator=generator) * 0.1
        for module, shape in SHAPES.items()
    }
    return {**tensors, "lm_head.weight": torch.ones(8, 8)}


@pytest.fixture
def opened(tmp_path):
    """The format of a checkpoint, read as from its folder."""

    def open_it(checkpoint: Checkpoint) -> Format:
        import json

        for name, content in checkpoint.files.items():
            (tmp_path / name).write_text(json.dumps(content))
        form = read_format({"quantization_config": checkpoint.config}, tmp_path)
        assert form is not None
        return form

    return open_it


def formula(part: Quantised) -> torch.Tensor:
    """The weight in float64, as `Quantised` says."""
    (rows, columns), scales = part.values.shape, part.scales.double()
    if part.values.dtype == torch.float8_e4m3fn:
        if scales.shape != (rows, 1):
            scales = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return part.values.double() * scales
    group = columns // scales.shape[1]
    zeros = 8.0 if part.zero_points is None else part.zero_points.double()
    spread = torch.as_tensor(zeros).expand(scales.shape).repeat_interleave(group, 1)
    return (part.values.double() - spread) * scales.repeat_interleave(group, 1)


def check_specs(form: Format, checkpoint: Checkpoint, module: str, shape) -> None:
    """The format names exactly the tensors that are there."""
    specs = form.specs(module, shape)
    assert set(specs) == {name for name in checkpoint.tensors if name.startswith(f"{module}.")}
    for name, spec in specs.items():
        assert spec.fits(checkpoint.tensors[name].shape), name
        assert not spec.fits((*checkpoint.tensors[name].shape, 2)), name
        assert checkpoint.tensors[name].dtype in spec.dtypes, name


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_those_of_the_formula(name, opened):
    checkpoint = quantised(float_tensors(), name)
    form = opened(checkpoint)
    assert form.scheme("lm_head") is None
    for module, shape in SHAPES.items():
        check_specs(form, checkpoint, module, shape)
        part = form.read(module, Region.whole(*shape), reader(checkpoint.tensors))
        assert torch.equal(formula(part), checkpoint.weights[module])
        check_form(part, form.scheme(module), shape)


def check_form(part: Quantised, scheme, shape) -> None:
    assert scheme is not None
    assert part.values.shape == shape
    assert part.scales.dtype == torch.float32
    if scheme.kind is Kind.INT4:
        groups = shape[1] // scheme.group if scheme.group else 1
        assert part.values.dtype == torch.uint8
        assert part.scales.shape == (shape[0], groups)
        assert part.zero_points is None or (
            part.zero_points.dtype == torch.uint8 and part.zero_points.shape == (shape[0], groups)
        )
    else:
        blocks = tuple(math.ceil(size / 128) for size in shape)
        assert part.scales.shape == ((shape[0], 1) if scheme.kind is Kind.FP8_CHANNELS else blocks)
    assert (part.input_scale is not None) == scheme.static_input
    if part.input_scale is not None:
        assert part.input_scale.shape == ()
        assert part.input_scale.dtype == torch.float32
        assert part.input_scale.item() == pytest.approx(INPUT_SCALE, rel=1e-2)
    for tensor in (part.values, part.scales, part.zero_points):
        assert tensor is None or tensor.is_contiguous()


@pytest.mark.parametrize(
    ("name", "kind", "static", "float_input"),
    [
        ("compressed-tensors-tensor-static", Kind.FP8_CHANNELS, True, False),
        ("compressed-tensors-channel-dynamic", Kind.FP8_CHANNELS, False, False),
        ("compressed-tensors-blocks", Kind.FP8_BLOCKS, False, False),
        ("compressed-tensors-float-input", Kind.FP8_CHANNELS, False, True),
        ("fp8-static", Kind.FP8_CHANNELS, True, False),
        ("fp8-dynamic", Kind.FP8_CHANNELS, False, False),
        ("fp8-blocks", Kind.FP8_BLOCKS, False, False),
        ("modelopt-fp8", Kind.FP8_CHANNELS, True, False),
        ("modelopt-fp8-channel", Kind.FP8_CHANNELS, False, False),
        ("awq", Kind.INT4, False, False),
        ("gptq", Kind.INT4, False, False),
    ],
)
def test_schemes(name, kind, static, float_input, opened):
    scheme = opened(quantised({}, name)).scheme(MODULE)
    assert (scheme.kind, scheme.static_input, scheme.float_input) == (kind, static, float_input)


@pytest.mark.parametrize("name", COMPRESSED)
def test_weights_are_bit_for_bit_those_of_compressed_tensors(name, opened):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    checkpoint = quantised(float_tensors(), name)
    form = opened(checkpoint)
    theirs = QuantizationConfig.model_validate(checkpoint.config)
    compressor = BaseCompressor.get_value_from_registry(theirs.format)
    for module, shape in SHAPES.items():
        start = f"{module}."
        state = {
            key.removeprefix(start): each
            for key, each in checkpoint.tensors.items()
            if key.startswith(start)
        }
        wide = compressor.decompress(state, theirs.config_groups["group_0"])["weight"]
        part = form.read(module, Region.whole(*shape), reader(checkpoint.tensors))
        assert torch.equal(formula(part).float().to(wide.dtype), wide)


@pytest.mark.parametrize("symmetric", [True, False])
def test_what_compressed_tensors_packed_is_read(symmetric, opened):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    name = "pack-quantized-group" if symmetric else "pack-quantized-asym"
    checkpoint = quantised({}, name)
    theirs = QuantizationConfig.model_validate(checkpoint.config)
    generator = torch.Generator().manual_seed(2)
    whole = torch.randint(-8, 8, (20, 64), generator=generator)
    scales = 2.0 ** torch.randint(-4, 0, (20, 2), generator=generator)
    zeros = torch.randint(-8, 8, (20, 2), generator=generator) * (not symmetric)
    weight = (whole - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    compressor = BaseCompressor.get_value_from_registry(theirs.format)
    packed = compressor.compress(state, theirs.config_groups["group_0"])
    tensors = {f"{MODULE}.{key}": each for key, each in packed.items()}
    part = opened(checkpoint).read(MODULE, Region.whole(20, 64), reader(tensors))
    assert torch.equal(part.values, (whole + 8).to(torch.uint8))
    assert torch.equal(formula(part), weight.double())


def test_four_bits_come_out_lowest_first():
    word = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
    assert unpacked(word).tolist() == [list(range(16))]


def test_a_symmetric_gptq_has_no_zero_points_and_an_asymmetric_one_has(opened):
    for name, has in (("gptq", False), ("gptq-asym", True), ("gptq-v2", True)):
        checkpoint = quantised(float_tensors(), name)
        part = opened(checkpoint).read(MODULE, WHOLE, reader(checkpoint.tensors))
        assert (part.zero_points is not None) == has


def test_a_gptq_zero_point_of_0_comes_back_from_15(opened):
    checkpoint = quantised(float_tensors(), "gptq-asym")
    checkpoint.tensors[f"{MODULE}.qzeros"].fill_(-1)
    part = opened(checkpoint).read(MODULE, WHOLE, reader(checkpoint.tensors))
    assert part.zero_points is not None
    assert not part.zero_points.any()


# -- tensors that are refused -------------------------------------------------------------------

SCALES = {"awq": "scales", "gptq": "scales", "fp8-blocks": "weight_scale_inv"}


@pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize(
    "name",
    ["compressed-tensors-channel-dynamic", "pack-quantized-group", "fp8-blocks", "awq", "gptq"],
)
def test_a_scale_that_is_not_finite_or_not_positive_is_refused_by_name(name, bad, opened):
    checkpoint = quantised(float_tensors(), name)
    tensor = f"{MODULE}.{SCALES.get(name, 'weight_scale')}"
    checkpoint.tensors[tensor].flatten()[-1] = bad
    with pytest.raises(ModelError, match=f"{tensor} holds a scale that is not finite or not posit"):
        opened(checkpoint).read(MODULE, WHOLE, reader(checkpoint.tensors))


@pytest.mark.parametrize("name", ["compressed-tensors-tensor-static", "fp8-static", "modelopt-fp8"])
def test_a_bad_input_scale_is_refused_by_name(name, opened):
    checkpoint = quantised(float_tensors(), name)
    checkpoint.tensors[f"{MODULE}.input_scale"].fill_(math.nan)
    with pytest.raises(ModelError, match=rf"{MODULE}\.input_scale"):
        opened(checkpoint).read(MODULE, WHOLE, reader(checkpoint.tensors))


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "dtype"),
    [
        ("fp8-dynamic", "weight", (144, 160), torch.int8),
        ("fp8-dynamic", "weight", (144, 160), torch.float8_e5m2),
        ("fp8-dynamic", "weight", (144, 160), torch.float8_e4m3fnuz),
        ("fp8-dynamic", "weight_scale", (160,), torch.float32),
        ("fp8-blocks", "weight_scale_inv", (1, 2), torch.float32),
        ("fp8-blocks", "weight_scale_inv", (2, 2), torch.uint8),
        ("modelopt-fp8", "weight_scale", (144,), torch.float32),
        ("compressed-tensors-channel-dynamic", "weight_scale", (1,), torch.bfloat16),
        ("pack-quantized-group", "weight_packed", (144, 40), torch.int32),
        ("pack-quantized-group", "weight_scale", (144, 1), torch.bfloat16),
        ("pack-quantized-asym", "weight_zero_point", (144, 5), torch.int32),
        ("awq", "qweight", (144, 20), torch.int32),
        ("awq", "qzeros", (5, 18), torch.int16),
        ("gptq", "scales", (144, 5), torch.float16),
    ],
)
def test_specs_refuse_other_shapes_and_dtypes(name, tensor, shape, dtype, opened):
    spec = opened(quantised({}, name)).specs(MODULE, (144, 160))[f"{MODULE}.{tensor}"]
    assert not (spec.fits(shape) and dtype in spec.dtypes)


def test_one_scale_may_be_a_scalar_or_a_list_and_that_of_fp8_one_a_channel(opened):
    form = opened(quantised({}, "fp8-dynamic"))
    spec = form.specs(MODULE, (144, 160))[f"{MODULE}.weight_scale"]
    assert all(spec.fits(shape) for shape in [(), (1,), (1, 1), (144,), (144, 1)])
    tensors = {
        f"{MODULE}.weight": torch.ones(3, 16).to(torch.float8_e4m3fn),
        f"{MODULE}.weight_scale": torch.tensor([1.0, 2.0, 3.0]),
    }
    part = form.read(MODULE, Region.whole(3, 16), reader(tensors))
    assert part.scales.tolist() == [[1.0], [2.0], [3.0]]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "pack-quantized-group",
            (144, 176),
            "176 inputs, which is no multiple of the group size 3",
        ),
        ("awq", (144, 176), "176 inputs, which is no multiple of the group size 32"),
        ("gptq", (144, 176), "176 inputs, which is no multiple of the group size 32"),
        ("awq", (141, 160), "141 outputs, which is no multiple of the 8 that an int32 holds"),
        ("gptq", (141, 160), "141 outputs, which is no multiple of the 8"),
        ("gptq-channel", (144, 164), "164 inputs, which is no multiple of the 8"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_module(name, shape, message, opened):
    with pytest.raises(UnsupportedModelError, match=f"{MODULE} has {message}"):
        opened(quantised({}, name)).specs(MODULE, shape)


@pytest.mark.parametrize("name", FORMS)
def test_a_rank_reads_its_part_of_the_weight(name, opened):
    checkpoint = quantised(float_tensors(), name)
    form, get = opened(checkpoint), reader(checkpoint.tensors)
    for module, shape in SHAPES.items():
        whole = formula(form.read(module, Region.whole(*shape), get))
        rows, columns = ((Range(0, 128), Range(128, size)) for size in shape)
        regions = [Region.some_rows(shape, own) for own in rows]
        for region in [*regions, *(Region.some_columns(shape, own) for own in columns)]:
            part = form.read(module, region, get)
            assert part.values.shape == region.size
            assert torch.equal(formula(part), region.of(whole)), (module, region)


def test_act_order_is_refused_and_desc_act_in_plain_order_is_not(opened):
    checkpoint = quantised(float_tensors(), "gptq")
    assert checkpoint.config is not None
    checkpoint.config["desc_act"] = True
    form, get = opened(checkpoint), reader(checkpoint.tensors)
    part = form.read(MODULE, WHOLE, get)
    assert torch.equal(formula(part), checkpoint.weights[MODULE])
    order = checkpoint.tensors[f"{MODULE}.g_idx"]
    order[[0, -1]] = order[[-1, 0]]
    with pytest.raises(UnsupportedModelError, match=rf"{MODULE}\.g_idx .*act-order.*supported: d"):
        form.read(MODULE, WHOLE, get)


def test_a_weight_shape_that_disagrees_is_refused(opened):
    checkpoint = quantised(float_tensors(), "pack-quantized-group")
    checkpoint.tensors[f"{MODULE}.weight_shape"][1] = 152
    with pytest.raises(ModelError, match=r"weight_shape is \[144, 152\], the config says \[144, 1"):
        opened(checkpoint).read(MODULE, WHOLE, reader(checkpoint.tensors))
