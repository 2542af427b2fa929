"""Layers that differ: heads of several sizes, K and V that later layers read, inputs of layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_kit import finish, running, submit
from test_model_logits import load
from tiny_families import BY_LAYER
from tiny_models import write_tiny_model

from engine.config import EngineConfig
from engine.model import ModelError
from engine.parts.paging import EngineError, check_groups


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    return write_tiny_model(folder, tokenizer=False, **BY_LAYER["gemma4_shared"])


def test_each_group_has_heads_of_its_own_and_shared_layers_have_none(path):
    """Six layers, of which the last three read K and V of the second and the third."""
    config = load(path).config
    assert list(config.keepers) == [0, 1, 2]
    assert [mixer.kv_from for mixer in config.mixers] == [None, None, None, 1, 2, 1]
    with running(path, num_pages=18, max_sequences=2, max_step_tokens=64) as engine:
        finish(submit(engine, list(range(1, 60)), 8, ignore_eos=True))
        full, window = engine.pools
        assert [(pool.num_layers, pool.num_kv_heads, pool.head_dim) for pool in engine.pools] == [
            (1, 2, 32),
            (2, 2, 16),
        ]
        assert (full.page_bytes, window.page_bytes) == (
            16 * 2 * 2 * 32 * 4,
            2 * 16 * 2 * 2 * 16 * 4,
        )


def test_hooks_are_refused_by_name(path):
    with pytest.raises(EngineError, match=r"hooks are set: .* K and V .* differ in shape"):
        check_groups(EngineConfig(model=str(path), hooks=("any",)), load(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"layer_types": ["full_attention"] * 3 + ["sliding_attention", "full_attention"] * 1},
            "Gemma4ForCausalLM",
        ),
        ({"global_head_dim": 10**10}, "width of a head is 10000000000"),
        ({"num_kv_shared_layers": 6}, "layer 0 reads K and V of a layer before it"),
        ({"hidden_size_per_layer_input": 10**10}, "the width of layers' inputs is 10000000000"),
        ({"use_bidirectional_attention": "all"}, "attention is causal only"),
    ],
)
def test_what_cannot_be_is_named_before_weights_are_read(
    changes: dict[str, Any], words, path, tmp_path
):
    config = json.loads((path / "config.json").read_text())
    config.pop("per_layer_config", None)
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=words):
        load(tmp_path)
