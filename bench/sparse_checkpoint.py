"""A checkpoint of any size that takes no room: safetensors files, all of whose numbers are zero.

Each file has a header and a hole. A file system that keeps holes (ext4, xfs, tmpfs, overlayfs)
stores the header alone, and reads of the rest give zeros. Files have the usual size of shards: the
kernel refuses to map one of more than the machine's memory.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

BYTES = 2
"""Of a bfloat16 number."""
SHARD_BYTES = 5_000_000_000


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama model whose config.json lies in the folder, by name."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    hidden, middle, vocab = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    q, kv = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    layer = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    ends = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    head = {} if config["tie_word_embeddings"] else {"lm_head": (vocab, hidden)}
    layers = {
        f"model.layers.{number}.{name}": shape
        for number in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    return {f"{name}.weight": shape for name, shape in {**ends, **head, **layers}.items()}


def write(config: Path, folder: Path) -> int:
    """Writes a checkpoint of that config.json's model; returns the bytes of its numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(config / "config.json", folder)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    for name, shape in shapes_of(folder).items():
        if sum(map(_size, shards[-1].values())) + _size(shape) > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = shape
    files = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    written = sum(map(_write_shard, shards, [folder / file for file in files]))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": written}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return written


def _size(shape: tuple[int, ...]) -> int:
    return BYTES * math.prod(shape)


def _write_shard(shapes: dict[str, tuple[int, ...]], path: Path) -> int:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + _size(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end
