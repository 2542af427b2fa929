"""What cannot run through transformers' own code is refused before weights are read, with the class
and the reason. There are no weights here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_config

from engine.model import ModelError, UnsupportedModelError, load_model
from engine.model.families import FAMILIES
from engine.model.shard import Shard
from engine.model.wrapped.classes import (
    BIASES,
    BY_LENGTH,
    ENCODER,
    IMAGES,
    QUANTISED,
    RECURRENT,
    find,
)

INDEX = "attention over tokens that an index chooses"
OWN = "its attention does not ask transformers' table"
VALUES = "its code cannot run without numbers"
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba": ("MambaForCausalLM", RECURRENT, {}),
    "rwkv": ("RwkvForCausalLM", RECURRENT, {}),
    "bamba": ("BambaForCausalLM", RECURRENT, {}),
    "falcon_h1": ("FalconH1ForCausalLM", RECURRENT, {}),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", RECURRENT, {}),
    "lfm2": ("Lfm2ForCausalLM", RECURRENT, {"layer_types": ["conv", "full_attention"]}),
    "minimax": ("MiniMaxForCausalLM", RECURRENT, {}),
    "qwen3_next": ("Qwen3NextForCausalLM", RECURRENT, {}),
    "bert": ("BertLMHeadModel", ENCODER, {}),
    "roberta": ("RobertaForCausalLM", ENCODER, {}),
    "electra": ("ElectraForCausalLM", ENCODER, {}),
    "bart": ("BartForCausalLM", ENCODER, {"is_encoder_decoder": True}),
    "bloom": ("BloomForCausalLM", OWN, {}),
    "mpt": ("MptForCausalLM", OWN, {}),
    "falcon": ("FalconForCausalLM", BIASES, {"alibi": True}),
    "doge": ("DogeForCausalLM", "it changes the mask of its attention", {}),
    "openai-gpt": ("OpenAIGPTLMHeadModel", OWN, {}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", INDEX, {}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", INDEX, {}),
    "git": ("GitForCausalLM", IMAGES, {}),
    "xlm": ("XLMWithLMHeadModel", VALUES, {}),
    "arcee": ("ArceeForCausalLM", QUANTISED, {"quantization_config": {"quant_method": "fp8"}}),
    "llama": (
        "LlamaForCausalLM", BY_LENGTH,
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
}  # fmt: skip
"""By model type: the class, the reason, and options of the config. Some have a file of ours."""
QUICK = ("mamba", "bert", "bloom", "doge", "deepseek_v32", "git")


def write(path: Path, model_type: str, name: str, **options: Any) -> Path:
    config = tiny_config(model_type, **options).to_dict()
    (path / "config.json").write_text(json.dumps(config | {"architectures": [name]}, default=str))
    return path


def refused(path: Path, impl: str = "transformers", **more: Any) -> str:
    kind = {"dtype": torch.float32, "device": torch.device("cpu"), "model_impl": impl}
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(path), **kind, **more, load_format="dummy")
    return str(caught.value)


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(each, marks=() if each in QUICK else pytest.mark.matrix) for each in REFUSED],
)
def test_named_with_class_and_reason(tmp_path, model_type):
    name, reason, options = REFUSED[model_type]
    message = refused(write(tmp_path, model_type, name, **options))
    assert message.startswith(f"{name}, through transformers' own code: ")
    assert reason in message
    if model_type not in FAMILIES:
        assert reason in refused(tmp_path, "auto"), "what ours and theirs say"


def test_code_in_a_folder_is_never_run(tmp_path):
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n"
    (tmp_path / "modeling_own.py").write_text(code)
    auto = {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    own = {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": auto}
    (tmp_path / "config.json").write_text(json.dumps(own))
    for impl in ("transformers", "auto"):
        assert "auto_map, is never run" in refused(tmp_path, impl)
    config = tiny_config("llama").to_dict() | {"auto_map": auto}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": None}))
    loaded = load_model(
        str(tmp_path), dtype=torch.float32, device=torch.device("cpu"),
        model_impl="transformers", load_format="dummy",
    )  # fmt: skip
    assert loaded.config.architecture == "LlamaForCausalLM"
    assert not ran.exists()


KERNEL = "org/repo"


@pytest.mark.parametrize(
    "stated",
    [
        {"attn_implementation": KERNEL},
        {"_attn_implementation": KERNEL},
        {"_attn_implementation": {"": KERNEL}},
        {"experts_implementation": KERNEL},
        {"_experts_implementation": KERNEL},
        {"attribute_map": {"foo": "_attn_implementation"}, "foo": KERNEL},
        {"attribute_map": {"_attn_implementation": "foo"}, "foo": KERNEL},
        {"per_layer_config": {"0": {"_attn_implementation": KERNEL}}},
    ],
    ids=json.dumps,
)
def test_kernels_that_a_folder_names_are_not_fetched(tmp_path, monkeypatch, stated):
    import transformers.modeling_utils as theirs

    asked = []
    known = theirs.is_kernel
    monkeypatch.setattr(theirs, "is_kernel", lambda name: asked.append(name) or known(name))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = tiny_config("qwen3_moe", **experts).to_dict() | {"architectures": None}
    (tmp_path / "config.json").write_text(json.dumps(config | stated))
    _, found = find(tmp_path)
    assert {found._attn_implementation, found._experts_implementation} == {None}
    assert KERNEL not in found.to_json_string(use_diff=False) or "foo" in stated
    load_model(
        str(tmp_path), dtype=torch.float32, device=torch.device("cpu"),
        model_impl="transformers", load_format="dummy",
    )  # fmt: skip
    assert asked
    assert KERNEL not in asked


def test_other_classes_and_words_are_named(tmp_path):
    write(tmp_path, "llama", "LlamaForSequenceClassification")
    assert "the decoder is LlamaForCausalLM" in refused(tmp_path)
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(ModelError, match="model_impl 'own' is not one of"):
        load_model(str(tmp_path), **kind, model_impl="own")


RANKS = {
    "phi3": ("Phi3ForCausalLM", "transformers' plan has colwise_gather_output", {}),
    "gpt2": ("GPT2LMHeadModel", "transformers has no plan for it", {}),
    "mixtral": ("MixtralForCausalLM", "transformers' plan has moe_tp_experts, packed_colwise", {}),
    "llama": ("LlamaForCausalLM", "it does not divide 1 heads", {"kv_heads": 1}),
}


@pytest.mark.parametrize("model_type", RANKS)
def test_ranks_that_cannot_share_it(tmp_path, model_type):
    name, reason, options = RANKS[model_type]
    write(tmp_path, model_type, name, **options)
    assert f"{name}, through transformers' own code: tp 2: " in (
        message := refused(tmp_path, shard=Shard(0, 2))
    )
    assert reason in message
