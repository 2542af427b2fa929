"""Draft heads in folders, what plain PyTorch says that they draft, and a head that knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMATS = ("original", "speculators")
TAPS = (2, 3, 4)
"""Read of a model of five layers: what enters these."""
DRAFTED = 200
"""Tokens that a head may draft, of 384."""


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def write_head(
    folder: Path, model: Path, form: str = "original", *, seed: int = 0, scale: float = 0.2, **more
) -> Path:
    """A random head for a model, in one of the two formats; `more` goes into its config."""
    target, taps = config_of(model), more.pop("taps", TAPS)
    hidden, heads, kv = target["hidden_size"], 4, 2
    dim, wide = hidden // heads, 2 * hidden
    drafted = more.pop("drafted", DRAFTED)
    torch.manual_seed(seed)
    shapes = {
        "fc": (hidden, 3 * hidden),
        "norm": (hidden,),
        "lm_head": (drafted, hidden),
        "layer.input_layernorm": (hidden,),
        "layer.hidden_norm": (hidden,),
        "layer.post_attention_layernorm": (hidden,),
        "layer.self_attn.q_proj": (heads * dim, wide),
        "layer.self_attn.k_proj": (kv * dim, wide),
        "layer.self_attn.v_proj": (kv * dim, wide),
        "layer.self_attn.o_proj": (hidden, heads * dim),
        "layer.mlp.gate_proj": (wide, hidden),
        "layer.mlp.up_proj": (wide, hidden),
        "layer.mlp.down_proj": (hidden, wide),
    }
    tensors = {
        f"{name}.weight": torch.rand(shape) + 0.5 if "norm" in name else torch.randn(shape) * scale
        for name, shape in shapes.items()
    }
    ids = torch.randperm(target["vocab_size"])[:drafted].sort().values
    tensors["d2t"] = ids - torch.arange(drafted)
    tensors["t2d"] = torch.zeros(target["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return save_head(
        folder,
        form,
        tensors,
        {**_layer_of(hidden, target["vocab_size"]), "draft_vocab_size": drafted, **more},
        taps,
    )


def save_head(
    folder: Path, form: str, tensors: dict[str, Tensor], stated: dict[str, Any], taps=TAPS
) -> Path:
    """Writes a head whose layer is called `layer`."""
    folder.mkdir(parents=True, exist_ok=True)
    stated = dict(stated)
    drafted, before = stated.pop("draft_vocab_size"), stated.pop("norm_before_residual", False)
    if form == "original":
        # It counts what layers give where it begins at 1; else what enters them.
        taps = [tap - 1 for tap in taps] if taps[0] == 2 else list(taps)
        config = {
            **stated,
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": drafted,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": taps,
                "norm_before_residual": before,
            },
        }
        names = {"layer.": "midlayer."}
    else:
        outer = {
            name: stated.pop(name)
            for name in ("speculators_config", "speculators_model_type", "norm_output")
            if name in stated
        }
        config = {
            "speculators_model_type": "eagle3",
            "architectures": ["Eagle3Speculator"],
            "draft_vocab_size": drafted,
            "norm_before_residual": before,
            "eagle_aux_hidden_state_layer_ids": list(taps),
            "transformer_layer_config": {"model_type": "llama", **stated},
            **outer,
        }
        names = {"layer.": "layers.0."}
    named = {
        next(
            (new + name[len(old) :] for old, new in names.items() if name.startswith(old)), name
        ): t
        for name, t in tensors.items()
    }
    save_file({name: t.contiguous() for name, t in named.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Drafted(NamedTuple):
    tokens: list[int]
    k: Tensor
    """[L, heads, D]: of all tokens but the last."""
    v: Tensor


class PlainHead:
    """A head over a model of transformers, in plain PyTorch: no pages, no steps, no cache."""

    def __init__(self, folder: Path, model: Path, taps: Sequence[int] = TAPS) -> None:
        raw = load_file(folder / "model.safetensors")
        self._w = {
            name.replace("midlayer.", "layer.").replace("layers.0.", "layer."): each
            for name, each in raw.items()
        }
        stated = config_of(folder)
        inner = stated.get("transformer_layer_config", stated)
        own = stated.get("eagle_config", stated)
        self._before = own.get("norm_before_residual", False)
        self._heads, self._kv = inner["num_attention_heads"], inner["num_key_value_heads"]
        self._dim, self._eps = inner["head_dim"], inner["rms_norm_eps"]
        self._theta = inner["rope_theta"]
        self._taps, self._model = taps, reference_of(model)

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int, first: int = 0) -> Drafted:
        """What follows these tokens, of which the last is not in the model's KV yet. The head sees
        none before the `first`."""
        ids = torch.tensor(tokens)
        found = self._model(ids[None, :-1], output_hidden_states=True).hidden_states
        features = torch.cat([found[tap][0] for tap in self._taps], 1) @ self._w["fc.weight"].T
        behind, drafts = ids[1:].tolist(), []
        kept = None
        for _ in range(count):
            hidden, k, v = self._layer(features, torch.tensor(behind), first)
            kept = kept or (k, v)
            logits = self._normed(hidden[-1:], "norm") @ self._w["lm_head.weight"].T
            best = int(logits.argmax())
            best += int(self._w["d2t"][best]) if "d2t" in self._w else 0
            drafts.append(best)
            features, behind = torch.cat((features, hidden[-1:])), [*behind, best]
        return Drafted(drafts, *kept)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[f"{name}.weight"], self._eps)

    def _layer(self, features: Tensor, behind: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        embedding = self._w.get("embed_tokens.weight", self._model.get_input_embeddings().weight)
        normed = self._normed(features, "layer.hidden_norm")
        residual = normed if self._before else features
        x = torch.cat((self._normed(embedding[behind], "layer.input_layernorm"), normed), 1)
        q, k, v = (
            (x @ self._w[f"layer.self_attn.{name}_proj.weight"].T).view(len(x), -1, self._dim)
            for name in "qkv"
        )
        q, k = self._turned(q), self._turned(k)
        group = self._heads // self._kv
        seen = (k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        mask[first:, :first] = False
        read = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, *seen)), mask)
        x = residual + read.transpose(0, 1).flatten(1) @ self._w["layer.self_attn.o_proj.weight"].T
        normed = self._normed(x, "layer.post_attention_layernorm")
        gate, up = (normed @ self._w[f"layer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self._w["layer.mlp.down_proj.weight"].T, k, v

    def _turned(self, x: Tensor) -> Tensor:
        angles = torch.arange(len(x))[:, None] / self._theta ** (
            torch.arange(0, self._dim, 2) / self._dim
        )
        cos, sin = (torch.cat((f(angles),) * 2, 1)[:, None] for f in (torch.cos, torch.sin))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin


@cache
def reference_of(model: Path) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def write_oracle(model: Path, head: Path, form: str = "speculators", taps=TAPS) -> None:
    """A tiny model whose next token follows from the newest one alone, and a head that knows it: it
    finds the token in the taps, and goes from each to the next. `taps`: what the head is told to
    read, whatever it was made for."""
    from tiny_models import write_tiny_model

    vocab, hidden = 96, 128
    write_tiny_model(model, tokenizer=False, layers=5, vocab=vocab, hidden=hidden)
    weights = load_file(model / "model.safetensors")
    for name, each in weights.items():
        if name.endswith("o_proj.weight"):
            each.zero_()
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    ids = torch.arange(vocab)
    with torch.inference_mode():
        told = reference_of(model)(ids[:, None], output_hidden_states=True)
    behind = told.logits[:, 0].argmax(-1)
    # What one layer adds: no layer beside it adds that.
    added = told.hidden_states[TAPS[1]][:, 0] - told.hidden_states[TAPS[0]][:, 0]
    one = torch.eye(hidden)[:vocab]
    known = (torch.linalg.pinv(added.double()) @ one.double()).T.float()
    norm = hidden**0.5
    square = torch.zeros(2 * hidden, hidden)
    square[:vocab, :vocab] = torch.eye(vocab)
    down = torch.zeros(hidden, 2 * hidden)
    down[:, :vocab] = (one[behind] - one).T / norm**2
    lm_head = torch.zeros(vocab, hidden)
    lm_head[behind, ids] = 1.0
    tensors = {
        "fc.weight": torch.cat((-known, known, torch.zeros(hidden, hidden)), 1),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": lm_head,
        **{f"layer.{name}.weight": torch.ones(hidden) for name in _NORMS},
        **{
            f"layer.self_attn.{name}_proj.weight": torch.randn(rows, columns) * (name != "o")
            for name, rows, columns in (
                ("q", hidden, 2 * hidden), ("k", hidden // 2, 2 * hidden),
                ("v", hidden // 2, 2 * hidden), ("o", hidden, hidden),
            )
        },
        "layer.mlp.gate_proj.weight": square,
        "layer.mlp.up_proj.weight": square.clone(),
        "layer.mlp.down_proj.weight": down,
    }  # fmt: skip
    stated = {**_layer_of(hidden, vocab), "draft_vocab_size": vocab}
    save_head(head, form, tensors, stated, taps)


_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def _layer_of(hidden: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    }
