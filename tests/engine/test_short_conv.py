"""Short convolutions: their inputs are pages of a window, on every path of an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import build
from paths_kit import Pair, check_crowd, check_every_path, two_engines
from test_model_logits import load
from tiny_families import BY_LAYER
from tiny_models import write_tiny_model

from engine.attention.recurrent.short_conv import ShortConvBackend
from engine.groups.spec import Window
from engine.model import ModelError
from engine.model.mixers.config import ShortConvConfig
from engine.parts.paging import EngineError
from engine.pool.kv_pool import PlainPool
from engine.step.attention import AttentionBatch, AttentionSpec, Taps

KERNEL = 3
FAST, SLOW = (2, 65), (1, 3, 16, 17, 200)
LENGTHS = [*FAST, *(pytest.param(length, marks=pytest.mark.slow) for length in SLOW)]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("lfm2"), tokenizer=False, **BY_LAYER["lfm2"])


@pytest.fixture(scope="module")
def engines(path) -> Iterator[Pair]:
    with two_engines(path) as both:
        yield both


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_in_chunks_cached_forked_resumed_and_handed_off(engines, path, length):
    assert [spec.kind for spec in engines[0].pools.specs[1:]] == [Window(KERNEL)]
    check_every_path(engines, path, length)


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 26},
        {"num_pages": 26, "kv_host_bytes": 1 << 22},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_preempted_swapped_and_of_two_ranks(options, path):
    check_crowd(path, **options)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kernel", [2, 4])
def test_rows_convolve_what_their_pages_have(bias, kernel):
    """Against torch's convolution: a decode row, a prompt from its start, and a later piece."""
    torch.manual_seed(0)
    blocks, dim, size = 3, 2, 4
    channels, spec = 2 * blocks * dim, []
    taps = Taps(torch.randn(channels, kernel), torch.randn(channels) if bias else None)
    spec = (AttentionSpec(1.0, kernel, taps=taps),)
    pool = PlainPool(
        num_pages=20, num_layers=1, num_kv_heads=blocks, head_dim=dim, page_size=size,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    pool.elements.fill_(torch.nan)
    inputs = torch.randn(3, 30, channels)
    tables = torch.arange(1, 19).view(3, 6)
    wanted = torch.nn.functional.conv1d(
        inputs.mT, taps.weight[:, None], taps.bias, padding=kernel - 1, groups=channels
    )[..., :30].mT

    def run(rows: list[tuple[int, int, int]]) -> torch.Tensor:
        """Rows are (sequence, first token, end)."""
        lens = np.array([end - first for _, first, end in rows], np.int32)
        ends = np.array([end for _, _, end in rows], np.int32)
        at = torch.cat([torch.arange(first, end) for _, first, end in rows])
        table = tables[[which for which, _, _ in rows]]
        pages = table[np.repeat(np.arange(len(rows)), lens), at // size]
        backend = ShortConvBackend(pool, spec)
        backend.begin(AttentionBatch(lens, ends, int((lens == 1).sum()), table, pages, at % size))
        own = torch.cat([inputs[which, first:end] for which, first, end in rows])
        halves = own.view(len(own), blocks, 2, dim).unbind(2)
        return backend(0, halves[0], *halves).flatten(1)

    run([(0, 0, 9), (2, 0, 5)])
    rows = [(0, 9, 10), (1, 0, 7), (2, 5, 11)]
    found = run(rows)
    want = torch.cat([wanted[which, first:end] for which, first, end in rows])
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conv_L_cache": 9}, "conv_L_cache is 9; it can be 2 to 8"),
        ({"conv_L_cache": 1}, "conv_L_cache is 1"),
        ({"layer_types": ["conv"] * 4}, "layer_types are conv, 4 in all"),
        ({"layer_types": ["conv", "full_attention"]}, "LFM2|Lfm2ForCausalLM"),
        ({"hidden_size": 65}, "Lfm2ForCausalLM"),
    ],
)
def test_what_cannot_be_is_named_before_weights_are_read(changes, words, path, tmp_path):
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=words):
        load(tmp_path)


def test_what_does_not_go_with_convolutions_is_named(path):
    with pytest.raises(
        EngineError, match="what this model's convolutions read must not be rounded"
    ):
        build(path, kv_cache_dtype="fp8")
    config = ShortConvConfig(64, 3, 16)
    assert config.obstacle(3) == "it does not divide the 16 blocks of a convolution's channels"
    assert not config.obstacle(8)
