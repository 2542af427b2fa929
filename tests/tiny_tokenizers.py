"""Tokenizers of every kind that our families have, as model folders."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

CORPUS: Final = [
    "The quick brown fox jumps over the lazy dog, doesn't it? 12345 times!",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "いろはにほへと ちりぬるを 🏃‍♀️🏃 baton 🥖",
    "def f(x):\n    return x  # two  spaces\n\n\tand a tab",
]
KINDS: Final = ("pieces", "bytes", "gemma")
SPECIAL: Final = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
TEMPLATE: Final = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{{ eos_token }}"
    "{% endfor %}{{ unk_token }}{{ pad_token }}{{ image_token }}"
)
_SPLIT: Final = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@functools.cache
def file_of(kind: str, special: tuple[str, ...] = tuple(SPECIAL)) -> str:
    """A `tokenizer.json`: Llama 2's kind (pieces), Llama 3's (bytes), or Gemma's."""
    if kind == "bytes":
        return _bytes(list(special))
    spaced = [line.replace(" ", "▁") for line in CORPUS]
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bytes_ = [f"<0x{one:02X}>" for one in range(256)]
    trainer = BpeTrainer(vocab_size=420, special_tokens=[*special, *bytes_], show_progress=False)
    trained.train_from_iterator(spaced, trainer)
    found = json.loads(trained.to_str())
    found["added_tokens"] = [a for a in found["added_tokens"] if a["content"] not in bytes_]
    tokenizer = Tokenizer.from_str(json.dumps(found))
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        tokenizer.decoder = decoders.Sequence(parts)
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", special.index("<s>"))]
    )
    return tokenizer.to_str()


def _bytes(special: list[str]) -> str:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        BpeTrainer(
            vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer.to_str()


def write_folder(
    folder: Path,
    kind: str = "pieces",
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    files: dict[str, Any] | None = None,
) -> Path:
    """Writes a model folder without weights.

    Args:
        folder: where.
        kind: one of `KINDS`.
        config: its `tokenizer_config.json`; None: it has none.
        model: its `config.json`.
        files: further files, by name; other values than texts are written as JSON.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(file_of(kind), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(model or {"model_type": "llama"}))
    further = {**({"tokenizer_config.json": config} if config is not None else {}), **(files or {})}
    for name, content in further.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def texts(count: int) -> list[str]:
    """Texts with everything at which tokenizers differ: spaces, special tokens, broken words."""
    draw = random.Random(1)
    parts = [
        *"  \n\t▁a1é",
        *("<s>", "</s>", " <s> ", "<|im_start|>", "<|im_end|>", "<new>", "<unk>", "[INST]"),
        *("\r\n", "’", "ﬁ", "e\u0301", "\u00a0", "\u200b", "한국어", "🏃‍♀️", "ß", "İ", "123", " 45"),
        *(word for line in CORPUS for word in line.split()),
        *(f" {word}" for line in CORPUS for word in line.split()),
    ]
    fixed = ["", " ", "  ", "a", " a", "<s>a</s><s> b", "<s>[INST] Hi [/INST] Hi</s><s>[INST]"]
    drawn = ["".join(draw.choices(parts, k=draw.randint(1, 12))) for _ in range(count)]
    return [*fixed, *drawn][:count]
