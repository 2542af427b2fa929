"""Adapters as peft writes them, and what peft over transformers answers with them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from references import References
from tiny_models import reference_model

from engine.adapters.types import Adapter, LowRank

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def write_adapter(model: Path, folder: Path, seed: int = 1, **options: Any) -> Path:
    """Writes a random adapter for a model, by peft; `options` are those of `LoraConfig`. Its pairs
    are large enough to change most greedy tokens."""
    from peft import LoraConfig, get_peft_model

    options = {"r": 8, "lora_alpha": 16, "target_modules": EVERY} | options
    base = reference_model(model, dtype=torch.float32)
    torch.manual_seed(seed)
    own = get_peft_model(base, LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.15)
    own.save_pretrained(folder)
    return folder


def adapter(number: int, rows: int = 4) -> Adapter:
    """One that changes nothing; `number` is its content."""
    pair = LowRank(torch.zeros(1, rows), torch.zeros(rows, 1), 1.0)
    return Adapter(bytes([number]) * 32, {"q": pair}, 1)


def adapted(model: Path, folder: Path, *, merged: bool = False) -> Any:
    """The model of transformers with an adapter by peft, beside its weights or added to them."""
    from peft import PeftModel

    own = PeftModel.from_pretrained(reference_model(model, dtype=torch.float32), folder)
    return own.merge_and_unload() if merged else own.eval()


def answers(model: Path, folder: Path) -> References:
    """Greedy answers of a model with an adapter."""
    digest = hashlib.sha256((folder / "adapter_config.json").read_bytes())
    digest.update((folder / "adapter_model.safetensors").read_bytes())
    return References(model, f"adapter {digest.hexdigest()}", lambda: adapted(model, folder))
