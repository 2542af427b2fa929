"""Tiny random models in Hugging Face folders, with a real tokenizer, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Prefill runs the first leg, decode runs the second, the KV cache is the baton.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "いろはにほへと ちりぬるを", "🏃‍♀️🏃 baton 🥖",
]  # fmt: skip


def tiny_config(
    family: str = "llama",
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 384,
    max_positions: int = 2048,
    **options: Any,
) -> Any:
    """The config of transformers for a small model; `options` go into it. With `text` and `vision`
    among them it reads images, too; `text` is more of its text part."""
    from transformers import AutoConfig

    shape = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    options = {"tie_word_embeddings": False, **options}
    if "vision" in options:
        parts = {"text_config": shape | options.pop("text"), "vision_config": options.pop("vision")}
        return AutoConfig.for_model(family, **parts, **options)
    return AutoConfig.for_model(family, **shape, **options)


def write_tiny_model(path: Path, *, seed: int = 0, tokenizer: bool = True, **options: Any) -> Path:
    """Writes a random model that transformers can load; `options` are those of `tiny_config`.

    The weights are large enough for greedy output to differ from prompt to prompt.
    """
    import torch

    config = tiny_config(**options)
    torch.manual_seed(seed)
    model = class_of(config).from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("A_log"):  # What is long past still counts.
                parameter.uniform_(-5.0, -2.0)
            else:
                parameter.normal_(0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.2)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    if config.model_type == "qwen3_vl_moe":
        _transpose_experts(path / "model.safetensors")
    if config.model_type == "kimi_k25":
        _name_layers(path / "model.safetensors")
    if tokenizer:
        write_tokenizer(path)
    return path


def _transpose_experts(file: Path) -> None:
    """As they were published. transformers reads both, and writes the other."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for name in tensors:
        if ".mlp.experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})


def _name_layers(file: Path) -> None:
    """As they were published. transformers reads them, and names those of text as of images."""
    from safetensors.torch import load_file, save_file

    body = "language_model.model"
    tensors = load_file(file)
    named = {
        name.replace(f"{body}.blocks.", f"{body}.layers."): each for name, each in tensors.items()
    }
    save_file(named, file, {"format": "pt"})


def write_pooling_model(path: Path, *modules: tuple[str, dict[str, Any]], **options: Any) -> Path:
    """A tiny model as sentence-transformers saves one that embeds: without a head, without the
    body's name, and with these modules behind it."""
    import json

    from safetensors.torch import load_file, save_file

    write_tiny_model(path, **options)
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("model."): each for name, each in tensors.items()}
    bare.pop("lm_head.weight", None)
    save_file(bare, path / "model.safetensors", {"format": "pt"})
    write_modules(path, *modules)
    config = json.loads((path / "config.json").read_text())
    config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "Model")]
    (path / "config.json").write_text(json.dumps(config))
    return path


def write_modules(path: Path, *modules: tuple[str, dict[str, Any]]) -> None:
    """The files that sentence-transformers writes beside a model."""
    import json

    listed = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (name, config) in enumerate(modules, 1):
        folder = path / f"{index}_{name}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        kind = f"sentence_transformers.models.{name}"
        listed.append({"idx": index, "path": folder.name, "type": kind})
    (path / "modules.json").write_text(json.dumps(listed))


def write_scoring_model(path: Path, *, labels: int = 1, **options: Any) -> Path:
    """A tiny model with a head that scores in place of one that draws tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    write_tiny_model(path, **options)
    config = AutoConfig.from_pretrained(path)
    config.num_labels, config.pad_token_id = labels, 0
    body = reference_model(path).model
    model = AutoModelForSequenceClassification.from_config(config)
    model.model.load_state_dict(body.state_dict())
    torch.manual_seed(7)
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.2)
    model.save_pretrained(path)
    return path


def class_of(config: Any) -> Any:
    """The class of transformers that answers with text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if hasattr(config, "text_config") else AutoModelForCausalLM


def reference_model(path: Path, **options: Any) -> Any:
    """A model as transformers loads its folder."""
    from transformers import AutoConfig

    return class_of(AutoConfig.from_pretrained(path)).from_pretrained(path, **options)


def write_tokenizer(path: Path) -> None:
    """A byte-level BPE tokenizer of under 384 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", additional_special_tokens=SPECIAL_TOKENS
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
