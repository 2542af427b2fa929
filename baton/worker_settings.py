"""Settings of a worker process: one frozen model, validated once, at start."""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from baton.settings import (
    MOST_TOKENS,
    ROUTER_INTERNAL_ADDRESS,
    SETTINGS,
    Address,
    Addresses,
    Advertised,
    OtlpEndpoint,
)
from telemetry.failpoints import check as check_failpoints


class Role(StrEnum):
    """What a worker does. Every worker can do both: the role decides what routers send it."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


_ADMIN_PORT: Final = {Role.PREFILL: 9091, Role.DECODE: 9092, Role.BOTH: 9093}


class WorkerDebug(BaseModel):
    """Rarely needed settings of a worker: the table `[worker.debug]`, `BATON_DEBUG_*`, no flags.

    They may change from one release to the next.
    """

    model_config = SETTINGS

    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """`dummy` draws random weights, always the same: measuring speed needs no checkpoint."""
    attention: Literal["auto", "fa3", "fa2", "sdpa"] = "auto"
    """FlashAttention-3 or -2, or torch's own. `auto`: the best that runs here, and the log says
    why. FlashAttention-2 wants pages of 256 tokens."""
    num_pages: int = Field(default=0, ge=0)
    """Pages of the KV pool; overrides `kv_memory_gib`. 0: as many as fit in that."""
    mixed_prefill_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """Prompt tokens computed in a step that decodes, too: fewer make the others' tokens wait less,
    more compute the prompt sooner. 0: 192 on a decode worker, elsewhere as `max_step_tokens`."""
    eviction: Literal["lru", "lfu", "cost"] = "lru"
    """What the prefix cache lets go first: what was used longest ago, least often, or what is
    cheapest to compute again per use."""
    slow_peer_gigabytes_per_s: float = Field(default=-1, ge=-1)
    """A path to another worker measured slower than this is reported, and avoided by routers where
    there is another. 0: never. -1: 1 between GPUs, far below NVLink and RDMA, and else never."""
    profile: int = Field(default=0, ge=0)
    """Write a profile of so many first steps with work. SIGUSR2 asks for one at any time."""
    profile_dir: Path = Path("profiles")
    """Folder for profiles, as Chrome traces (chrome://tracing, Perfetto)."""
    max_granted_share: float = Field(default=0.25, gt=0, le=1)
    """Share of the pool that one prefill worker may have to write at once: grants beyond it wait,
    so that one that freezes cannot sit on the whole pool."""
    step_timeout_s: float = Field(default=60, gt=0)
    """A step, or a turn of the thread that moves KV pages, that hangs for longer ends the worker,
    with every thread's stack in its log, seconds. Whoever runs it starts it again."""
    poison_freed_pages: bool = False
    """Debugging: free KV pages carry a pattern, and writes to them are found and counted."""
    failpoints: Annotated[str, AfterValidator(check_failpoints)] = ""
    """Where this process fails on purpose, for tests alone: NAME=ACTION[:ARG][~KEY][@NTH],..."""


class WorkerSettings(BaseModel):
    """One worker process: engine, KV pool, transfer agent and the services of its role."""

    model_config = SETTINGS

    role: Role = Role.BOTH
    """What the worker offers. `both` is a whole server in one process."""
    name: str = Field(
        default_factory=lambda data: f"{data['role']}-{socket.gethostname()}", min_length=1
    )
    """Stable name in logs, metrics and the router's list. Give each worker its own: routers tell
    two of one name apart, but by numbers that are new at every start, and warn."""
    model: str = Field(default="demo", min_length=1)
    """Folder with config, weights and tokenizer; `demo` fetches a small model."""
    served_name: str = ""
    """Name that clients use. Empty: the folder's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and KV. `auto`: what config.json says, on a CPU float32 (the fast one there)."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto`, `cpu`, `cuda` or `cuda:N`. `auto`: the first GPU, where there is one."""
    gpu_slots_dir: str = ""
    """Folder that all workers of this host share, to claim one GPU each by a lock in it. Empty:
    `device` says which GPU."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of torch. 0: every core; share them out when workers share a machine."""

    listen: Address = "127.0.0.1:0"
    """Where routers reach the worker. Port 0 is fine: the worker announces the real one."""
    advertise: Advertised = ""
    """Address announced to routers. Empty or `:0`: `listen`; set it behind NAT or when listening on
    all. Port 0 stands for the real one."""
    address_file: str = ""
    """File that gets the worker's address once it serves: for `baton health @FILE` and scripts."""
    routers: Addresses = (ROUTER_INTERNAL_ADDRESS,)
    """Routers' internal addresses to announce to, until they answer: start order is free. A name
    stands for all of its addresses, and is looked up again every five seconds."""
    admin: Address = Field(
        default_factory=lambda data: f"127.0.0.1:{_ADMIN_PORT[data.get('role', Role.BOTH)]}"
    )
    """Where metrics and health are served."""

    page_size_tokens: int = Field(default=16, ge=1, le=256)
    """Tokens in a KV page: small wastes less, large moves in fewer pieces. Same on all workers."""
    kv_memory_gib: float = Field(default=0, ge=0)
    """Memory of the KV pool, GiB. 0: on a GPU what the largest step leaves of
    `gpu_memory_utilization`, on a CPU 1."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that the worker may take in all, where `kv_memory_gib` is 0."""
    max_sequences: int = Field(default=64, ge=1)
    """Sequences decoded in one step: more is more throughput and a slower token for each."""
    max_step_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """New tokens computed in one step, and so the chunk. 0: 512 on a CPU and on a decode worker,
    4,096 on a prefill worker, else 2,048."""
    max_context_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """Longest prompt and output together. 0: the model's own limit."""
    scheduling: Literal["fcfs", "priority", "shortest", "fair"] = "fcfs"
    """Which waiting request is admitted first: the one that came first, that of higher priority,
    with the shorter prompt (both with age counted in), or of the tenant with fewer running."""
    prefix_cache: bool = True
    """Keep the KV of finished prompts and reuse it for prompts that begin alike."""
    transport: Literal["nixl", "nccl", "loopback", "null"] = "nixl"
    """How KV pages move. `nccl` cannot see a dead peer and is for experiments; `null` moves
    nothing, for benchmarks of decoding."""

    otlp_endpoint: OtlpEndpoint = ""
    """OTLP/gRPC address for spans, such as http://127.0.0.1:4317. Empty: no spans."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line that is logged."""
    log_format: Literal["text", "json"] = "text"
    """`json` writes one object a line, for log collectors."""
    drain_s: float = Field(default=30, ge=0)
    """Seconds that running requests get to finish after SIGTERM."""

    debug: WorkerDebug = Field(default_factory=WorkerDebug)
    """Rarely needed settings: the table `[worker.debug]`."""

    @model_validator(mode="after")
    def _one_place_names_the_gpu(self) -> WorkerSettings:
        if self.gpu_slots_dir and self.device.startswith("cuda:"):
            raise ValueError("device must leave the choice of the GPU to gpu_slots_dir")
        return self

    @model_validator(mode="after")
    def _a_step_fits_a_page(self) -> WorkerSettings:
        if 0 < self.max_step_tokens < self.page_size_tokens:
            raise ValueError("max_step_tokens must be at least page_size_tokens")
        if 0 < self.debug.mixed_prefill_tokens < self.page_size_tokens:
            raise ValueError("debug.mixed_prefill_tokens must be at least page_size_tokens")
        return self
