"""A checkpoint's own draft layer drafts what transformers' layers say, and changes no token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_kit import build, finish, hand_off, running, submit
from heads_kit import config_of, reference_of
from references import references
from safetensors.torch import load_file, save_file
from test_heads import SHORT, drafting, prompts_of
from test_heads_handoff import prefilling
from tiny_families import EVERY, HYBRIDS
from tiny_models import write_tiny_model

from engine.model import ModelError

FAMILIES = ("glm4_moe", "deepseek_v3")
LAYERS = 2


def write_model(folder: Path, family: str) -> tuple[Path, Path]:
    """A tiny model with a draft layer, and that layer as a model of its own."""
    options = {**EVERY[family], "layers": LAYERS + 1, "first_k_dense_replace": 1}
    model, alone = folder / "model", folder / "alone"
    write_tiny_model(model, tokenizer=False, **options)
    weights, stated = load_file(model / "model.safetensors"), config_of(model)
    own, hidden = f"model.layers.{LAYERS}.", stated["hidden_size"]
    last = {
        name.replace(own, "model.layers.0."): each
        for name, each in weights.items()
        if name.startswith(own) or not name.startswith("model.layers.")
    }
    torch.manual_seed(4)
    added = {
        f"{own}eh_proj.weight": torch.randn(hidden, 2 * hidden) * 0.2,
        **{f"{own}{name}.weight": torch.rand(hidden) + 0.5 for name in ("enorm", "hnorm")},
        f"{own}shared_head.norm.weight": torch.rand(hidden) + 0.5,
        f"{own}shared_head.head.weight": weights["lm_head.weight"].clone(),
        f"{own}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    last["model.norm.weight"] = added[f"{own}shared_head.norm.weight"].clone()
    for path, tensors, more in (
        (model, weights | added, {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}),
        (alone, last, {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
    ):
        path.mkdir(exist_ok=True)
        lists = {
            name: stated[name][-1:] if path == alone else stated[name][:LAYERS]
            for name in ("mlp_layer_types", "layer_types")
            if name in stated
        }
        (path / "config.json").write_text(json.dumps(stated | more | lists))
        save_file(
            {name: each.contiguous() for name, each in tensors.items()},
            path / "model.safetensors",
            {"format": "pt"},
        )
    return model, alone


class PlainMtp:
    """The draft layer by transformers' own code, without a cache."""

    def __init__(self, model: Path, alone: Path) -> None:
        self._model, self._layer = reference_of(model), reference_of(alone)
        weights, own = load_file(model / "model.safetensors"), f"model.layers.{LAYERS}."
        self._w = {name.removeprefix(own): each for name, each in weights.items()}
        self._eps = config_of(model)["rms_norm_eps"]
        self._hidden: Any = None
        self._layer.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, _module: object, inputs: tuple[torch.Tensor]) -> None:
        self._hidden = inputs[0][0]

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        ids = torch.tensor(tokens)
        features = self._model.model(ids[None, :-1]).last_hidden_state[0]
        behind, drafts = ids[1:].tolist(), []
        for _ in range(count):
            embedded = self._model.get_input_embeddings()(torch.tensor(behind))
            both = self._normed(embedded, "enorm"), self._normed(features, "hnorm")
            x = torch.cat(both, 1) @ self._w["eh_proj.weight"].T
            best = int(self._layer(inputs_embeds=x[None]).logits[0, -1].argmax())
            drafts.append(best)
            features, behind = torch.cat((features, self._hidden[-1:])), [*behind, best]
        return drafts

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[f"{name}.weight"], self._eps)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_transformers(tmp_path, family: str) -> None:
    model, alone = write_model(tmp_path, family)
    answers, plain = references(model), PlainMtp(model, alone)
    with drafting(model, "mtp", max_step_tokens=48) as (engine, told):
        prompts = prompts_of()[::3]
        runs = [submit(engine, prompt, SHORT, ignore_eos=True) for prompt in prompts]
        finish(*runs)
        for prompt, run in zip(prompts, runs, strict=True):
            assert run.tokens == [answers(prompt, SHORT, past_end=True).tokens]
    assert len(told) > 2 * SHORT
    for tokens, drafted in list(told.items())[::4]:
        assert drafted.tokens == plain.draft(tokens, len(drafted.tokens))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_handed_off_and_divided(tmp_path, family: str) -> None:
    model, _ = write_model(tmp_path, family)
    answers = references(model)
    with (
        prefilling(model, speculation="mtp") as prefill,
        drafting(model, "mtp") as (decode, _),
    ):
        assert prefill.pools.drafts_digest == decode.pools.drafts_digest != ""
        for prompt in prompts_of()[3:6]:
            run = hand_off(prefill, decode, prompt, SHORT, ignore_eos=True)
            assert run.tokens == [answers(prompt, SHORT, past_end=True).tokens]
    with running(model, speculation="mtp", tp=2) as engine:
        prompt = prompts_of()[5]
        run = submit(engine, prompt, SHORT, ignore_eos=True)
        finish(run)
        assert run.tokens == [answers(prompt, SHORT, past_end=True).tokens]
        assert engine.load().speculation.drafted_tokens > 0


def test_what_has_no_draft_layer_is_refused(tmp_path) -> None:
    plain = write_tiny_model(tmp_path / "plain", tokenizer=False)
    with pytest.raises(ModelError, match="no draft layers of a LlamaForCausalLM are read; those"):
        build(plain, speculation="mtp")
    hybrid = write_tiny_model(tmp_path / "hybrid", tokenizer=False, **HYBRIDS["qwen3_next"])
    with pytest.raises(ModelError, match="Qwen3NextForCausalLM fold tokens into states"):
        build(hybrid, speculation="mtp")
    model, alone = write_model(tmp_path, "glm4_moe")
    with pytest.raises(ModelError, match=r"the checkpoint has no tensors model.layers.1.\*"):
        build(alone, speculation="mtp")
    weights = load_file(model / "model.safetensors")
    del weights[f"model.layers.{LAYERS}.eh_proj.weight"]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"does not fit its config: it has no eh_proj.weight"):
        build(model, speculation="mtp")
