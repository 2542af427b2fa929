"""The configuration of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from engine.bounds import Bounds

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["", "fp8"]
ModelImpl = Literal["auto", "native", "transformers"]
KvCacheDtype = Literal["auto", "fp8"]
Attention = Literal["auto", "fa3", "fa2", "triton", "sdpa"]
Scheduling = Literal["fcfs", "priority", "shortest", "fair"]
Eviction = Literal["lru", "lfu"]
OFF: Final = "off"
SUFFIX: Final = "suffix"
MTP: Final = "mtp"
MOST_DRAFTS: Final = 7
"""Most drafts of a row: with its last token they are a width of 8."""


def tiers_obstacle(*, host: bool, stores: bool, prefix_cache: bool) -> str:
    """Why there can be no tiers below the pool so; empty: there can, or none are wanted."""
    if host and not prefix_cache:
        return "kv_host_gib needs prefix_cache: pages are found by their keys"
    if stores and not host:
        return "kv_store needs kv_host_gib: pages pass through host memory"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Bounds):
    """The parameters of `Engine.build`, which validates them."""

    model: str
    """Hugging Face id, folder or GGUF file."""
    name: str = ""
    """Name that clients use; empty: the last part of `model`."""
    load_format: LoadFormat = "auto"
    dtype: Dtype = "auto"
    """Auto: float32 on CPU, bfloat16 elsewhere."""
    model_impl: ModelImpl = "auto"
    """What runs the model, one of `engine.model.loading.MODEL_IMPLS`."""
    quantization: Quantization = ""
    """"fp8" rounds the weights of a float checkpoint while they are loaded; "": nothing."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """How KV is stored, one of `engine.pool.kinds.POOLS`; auto: in the model's dtype."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1"; auto: cuda where there is one."""
    pp_layers: tuple[int, ...] = ()
    """Layers of each stage; empty: stages are about equally large."""
    kv_bands: int = 1
    """Pages have the layers of each of so many stages by themselves, for peers that have these."""
    tp: int = 1
    """Ranks that hold each of `pp` stages together (tensor parallelism). All ranks are this
    process, and others that it starts on this host, or that agents start on others."""
    expert_parallel: bool = False
    """Whether each rank of a stage holds whole experts instead of some of the width of each."""
    nodes: int = 1
    """Hosts of the ranks, equally many on each: those of this one come first."""
    expert_group: str = ""
    """The place in a group of workers that hold the experts together, `FOLDER?rank=R&ranks=N`;
    empty: this worker has all experts. See `engine.expert_groups`."""
    step_timeout_s: float = 60
    """With several ranks: if a step takes longer than this, all ranks are given up."""
    generation_config: bool = True
    """Whether the model's `generation_config.json` gives defaults of sampling."""
    seed: int = 0
    """Seed of dummy weights."""
    attention: Attention = "auto"
    """Auto: the best that runs on the device."""
    num_pages: int = 0
    """Pages in the pool, with the scratch page; 0: as many as `kv_memory_bytes` holds."""
    kv_memory_bytes: int = 0
    """Memory of each rank's pool if `num_pages` is 0, bytes. 0 means the memory that
    `gpu_memory_utilization` leaves on a GPU with the fast path, and 1 GiB elsewhere."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that this process may use, in all."""
    cuda_graphs: bool = True
    """Whether steps on a GPU replay graphs, which are made at the start. See
    `engine.cuda.steps.shapes`."""
    speculation: str = OFF
    """What guesses tokens that steps verify: one of `engine.speculation.choosing.DRAFTERS`, the
    folder of a draft head, mtp (the checkpoint's own draft layer), or off."""
    draft_tokens: int = 7
    """Most tokens that it guesses at a time."""
    synthetic_acceptance: float = -1
    """For measuring with dummy weights on a GPU: accepts drafts with this probability, whatever was
    drawn; -1: accepts those that are right."""
    scheduling: Scheduling = "fcfs"
    """Order of admission, one of `engine.schedule.policies.POLICIES`."""
    eviction: Eviction = "lru"
    """Order of eviction of cached pages, one of `engine.pages.eviction.EVICTION_POLICIES`."""
    adapters: tuple[str, ...] = ()
    """Adapters that are loaded at the start: name=folder."""
    max_adapter_rank: int = 64
    """Largest rank of an adapter."""
    adapters_host_bytes: int = 4 << 30
    """Host memory for all adapters, bytes."""
    kv_host_bytes: int = 0
    """Host memory for pages that the pool evicts, bytes; 0: none. See `engine.tiers`."""
    kv_stores: tuple[str, ...] = ()
    """Addresses of stores below the host memory. See `engine.tiers.stores.opening`."""
    kv_secret_file: str = ""
    """File with the secret that signs objects of stores to which others can write."""
    late_rows: bool = True
    """Whether a row may join a step that is launched (`engine.step.executor`)."""
    hooks: tuple[str, ...] = ()
    """Hooks with their options. See `engine.hooks.opening`."""
    hook_limit_s: float = 1
    """A hook that takes longer in one step is too slow and counts as failed, seconds."""
    poison_freed_pages: bool = False
    """For debugging: free pages carry a pattern, which is checked when they are used again."""

    @property
    def speculates(self) -> bool:
        """Whether steps verify drafts. An engine that does not decode has none."""
        return self.decodes and self.speculation != OFF

    @property
    def ranks(self) -> int:
        """Ranks of all stages."""
        return self.pp * self.tp

    @property
    def gpu_share(self) -> float:
        """A rank's share of its GPU's memory. A GPU that is named is that of all ranks."""
        shared = self.device.startswith("cuda:")
        return self.gpu_memory_utilization / (self.ranks if shared else 1)

    @property
    def rank_host_bytes(self) -> int:
        """A rank's part of the host memory."""
        return self.kv_host_bytes // self.tp
