"""How an engine is built."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything `Engine.build` needs; validated there."""

    model: str
    """Hugging Face id, folder or GGUF file."""
    name: str = ""
    """Name that clients use; empty: the last part of `model`."""
    load_format: str = "auto"
    """"auto", "safetensors", "gguf" or "dummy"."""
    dtype: str = "auto"
    """"float32", "bfloat16" or "float16"; auto: float32 on CPU, the model's own elsewhere."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1"; auto: cuda where there is one."""
    seed: int = 0
    """Of dummy weights."""
    attention: str = "auto"
    """"fa3", "fa2" or "sdpa"; auto: the best that runs on the device."""
    page_size: int = 16
    """Tokens in a page."""
    num_pages: int = 0
    """Pages in the pool, scratch page included; 0: as many as `kv_memory_bytes` holds."""
    kv_memory_bytes: int = 0
    """Memory of the pool where `num_pages` is 0; 0: what `gpu_memory_utilization` leaves on a GPU
    with a fast path, 1 GiB elsewhere."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that this process may use, in all."""
    cuda_graphs: bool = True
    """Whether steps on a GPU replay graphs, which are made at the start: `engine.cuda.shapes`."""
    decodes: bool = True
    """Whether sequences are decoded here; if not, no graphs are made for it."""
    max_sequences: int = 64
    """Slots of the batch."""
    max_step_tokens: int = 0
    """New tokens in a step: the chunk budget; 0: 512 on CPU, elsewhere 2048 where sequences are
    decoded and 4096 where not."""
    mixed_prefill_tokens: int = 0
    """Prefill tokens in a step that also decodes; 0: as `max_step_tokens`."""
    full_step_tokens: int = 0
    """Prompt tokens that keep the device busy: a prompt that would make a step longer than that
    waits for the next one, as long as it is not the step's first; 0: as `max_step_tokens`."""
    max_context_tokens: int = 0
    """Prompt and output together; 0: what the model takes, or less where the pool is smaller."""
    page_watermark: float = 0.9
    """Share of the pages in use above which fewer sequences are admitted, in (0, 1]; 1: never
    fewer. See `engine.admission.growth_reserve`."""
    scheduling: str = "fcfs"
    """Who is admitted first, one of `engine.policies.POLICIES`."""
    eviction: str = "lru"
    """Which cached page goes first, one of `engine.eviction.EVICTION_POLICIES`."""
    prefix_cache: bool = True
    poison_freed_pages: bool = False
    """Debugging: free pages carry a pattern, and are checked to carry it when they are used."""
