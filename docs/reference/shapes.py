"""Writes the table in `sizing.md`: memory of weights and KV for well-known models."""

from __future__ import annotations

from console.planning.shapes import BYTES, Shape
from reference import table

GIB = 1 << 30
GPUS_GB = (24, 48, 80, 141)
UTILIZATION = 0.9
"""The default of `gpu_memory_utilization`."""


SHAPES = (
    Shape("SmolLM2-135M (the demo)", 30, 576, 1536, 9, 3, 64, 49152, True),
    Shape("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151936, True),
    Shape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256, True),
    Shape("Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128256, True),
    Shape("Mistral-7B-v0.3", 32, 4096, 14336, 32, 8, 128, 32768, False),
    Shape("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064, False),
    Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256, False),
    Shape("Qwen3-8B", 36, 4096, 12288, 32, 8, 128, 151936, False),
    Shape("Qwen3-14B", 40, 5120, 17408, 40, 8, 128, 151936, False),
    Shape("Qwen3-32B", 64, 5120, 25600, 64, 8, 128, 151936, False),
    Shape("Llama-3.3-70B", 80, 8192, 28672, 64, 8, 128, 128256, False),
)


def shapes_table() -> str:
    """Writes weights, KV, and the number of tokens that fit, all in bfloat16."""
    head = ("model", "parameters", "weights", "KV a token", *(f"{gb} GB" for gb in GPUS_GB))
    rows = [
        (
            shape.name,
            f"{shape.parameters / 1e9:.2f} billion",
            f"{shape.parameters * BYTES / GIB:.1f} GiB",
            f"{shape.kv_bytes_per_token / 1024:g} KiB",
            *(_tokens(shape, gb) for gb in GPUS_GB),
        )
        for shape in SHAPES
    ]
    return table(head, *rows)


RANKS = (1, 2, 4, 8)
RANKED = ("Qwen3-32B", "Llama-3.3-70B")
RANKED_GPUS_GB = (80, 141)


def ranks_table() -> str:
    """Writes the weights of a rank, and the number of tokens that fit, for models that need several
    ranks."""
    gpus = (f"{gb} GB each" for gb in RANKED_GPUS_GB)
    rows = [
        (
            shape.name,
            precision,
            str(ranks),
            f"{shape.rank_bytes(ranks, size) / GIB:.1f} GiB",
            *(_ranked_tokens(shape, ranks, size, gb) for gb in RANKED_GPUS_GB),
        )
        for shape in SHAPES
        if shape.name in RANKED
        for precision, size in (("bfloat16", 2), ("FP8", 1))
        for ranks in RANKS
    ]
    return table(("model", "layers in", "ranks", "weights a rank", *gpus), *rows)


def _ranked_tokens(shape: Shape, ranks: int, size: int, gpu_gb: int) -> str:
    """As `_tokens`: of a rank's part of each token's KV."""
    room = UTILIZATION * gpu_gb * 1e9 - shape.rank_bytes(ranks, size)
    thousands = int(room / (shape.kv_bytes_per_token / min(ranks, shape.kv_heads)) / 1000)
    return f"{thousands:,},000" if thousands > 0 else "-"


def _tokens(shape: Shape, gpu_gb: int) -> str:
    """Number of KV tokens that fit beside the weights; "-" below a thousand."""
    room = UTILIZATION * gpu_gb * 1e9 - shape.parameters * BYTES
    thousands = int(room / shape.kv_bytes_per_token / 1000)
    return f"{thousands:,},000" if thousands > 0 else "-"
