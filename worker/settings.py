"""Settings of a worker process: one frozen model, validated once, at start."""

from __future__ import annotations

import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from baton.addresses import ROUTER_INTERNAL_ADDRESS, host_of, is_loopback
from baton.tls import TlsFiles, files_in
from engine.bounds import MOST_RANKS
from engine.config import (
    MOST_DRAFTS,
    Attention,
    Dtype,
    EngineConfig,
    Eviction,
    KvCacheDtype,
    LoadFormat,
    ModelImpl,
    Quantization,
    Scheduling,
    tiers_obstacle,
)
from faults.failpoints import check as check_failpoints
from serving.models import finding
from serving.models.demo_model import Progress
from serving.net.internal_net import check_exposure, check_receiver
from serving.settings import (
    MOST_TOKENS,
    SETTINGS,
    Address,
    Addresses,
    Advertised,
    Fabric,
    Numbers,
    OtlpEndpoint,
    Words,
)


class Role(StrEnum):
    """The role of a worker. Every worker can do both legs; routers send work by role."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


_ENGINE: Final = EngineConfig(model="demo")
"""The defaults of the engine, which are a worker's, too."""
_ADMIN_PORT: Final = {Role.PREFILL: 9091, Role.DECODE: 9092, Role.BOTH: 9093}


class WorkerDebug(BaseModel):
    """Rarely needed settings of a worker: the table `[worker.debug]`, `BATON_DEBUG_*`, no flags.
    They may change from one release to the next."""

    model_config = SETTINGS

    load_format: LoadFormat = _ENGINE.load_format
    """Sets the format of the weights. `dummy` draws random weights, always the same, to measure
    speed without a checkpoint."""
    pp_layers: Numbers = _ENGINE.pp_layers
    """Lists the layers of each of `pp` stages, with commas between, the first stage first. Empty:
    stages are about equally large, with embedding and head."""
    kv_bands: int = Field(default=_ENGINE.kv_bands, ge=1)
    """Lays pages out for peers of so many stages (`pp`), which then write one run of bytes each."""
    attention: Attention = _ENGINE.attention
    """Chooses the attention kernels: FlashAttention-3 or -2 (which needs pages of 256 tokens), ours
    in Triton, or torch's. `auto` takes the best that runs here and logs the reason."""
    num_pages: int = Field(default=_ENGINE.num_pages, ge=0)
    """Sets the number of pages in the KV pool and overrides `kv_memory_gib`. 0: as many as fit."""
    mixed_prefill_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """Limits the prompt tokens in a step that also decodes. Fewer delay running requests less, more
    compute the prompt sooner. 0: 192 on a decode worker and, on a GPU without stages, on one
    that does both; elsewhere `max_step_tokens`."""
    eviction: Eviction = _ENGINE.eviction
    """Chooses the pages that the prefix cache evicts first: least recently or least frequently
    used."""
    slow_peer_gigabytes_per_s: float = Field(default=-1, ge=-1)
    """Reports a path to another worker that is slower than this; routers avoid it if there is
    another. 0: never. -1: 1 GB/s between GPUs, far below NVLink and RDMA, otherwise never."""
    late_rows: bool = _ENGINE.late_rows
    """Lets a request whose KV arrives join a step that is launched: its second token is early."""
    profile: int = Field(default=0, ge=0)
    """Writes a profile of this many first steps with work. SIGUSR2 starts one at any time."""
    profile_dir: Path = Path("profiles")
    """Names the folder for profiles, which are Chrome traces (chrome://tracing, Perfetto)."""
    max_granted_share: float = Field(default=0.25, gt=0, le=1)
    """Limits the share of the pool's bytes that is granted to one prefill worker at once. Further
    grants wait, so that a frozen prefill worker cannot hold the whole pool."""
    step_timeout_s: float = Field(default=_ENGINE.step_timeout_s, gt=0)
    """Ends the worker if a step, or a turn of the thread that moves KV pages, takes longer than
    this, seconds. The log then has every thread's stack. A supervisor must start it again."""
    hook_limit_s: float = Field(default=_ENGINE.hook_limit_s, gt=0)
    """Counts a hook as failed if its calls take longer than this in one step, seconds."""
    poison_freed_pages: bool = _ENGINE.poison_freed_pages
    """Fills free KV pages with a pattern, and counts writes to them. For debugging."""
    page_size_tokens: int = Field(default=_ENGINE.page_size, ge=1, le=256)
    """Sets the number of tokens in a KV page. Small pages waste less, large ones move in fewer
    messages. It must be the same on all workers."""
    max_step_tokens: int = Field(default=_ENGINE.max_step_tokens, ge=0, le=MOST_TOKENS)
    """Limits the new tokens in one step, and so the size of a prompt's chunks. 0: 512 on a CPU and
    on a decode worker, 4,096 on a prefill worker, otherwise 2,048."""
    prefix_cache: bool = _ENGINE.prefix_cache
    """Keeps the KV of finished prompts, and reuses it for prompts with the same beginning."""
    generation_config: bool = _ENGINE.generation_config
    """Takes what a request leaves out of its sampling from the model's `generation_config.json`:
    temperature, top_p, top_k, min_p and repetition_penalty. Off: the API's own defaults."""
    transport: Literal["nixl", "nccl", "loopback"] = "nixl"
    """Chooses the transport of KV pages. `nccl` cannot see a dead peer and is for experiments; it
    is refused with TLS on an address that other machines reach, since its connections have none."""
    address_file: str = ""
    """Names a file. The worker writes its address there once it serves, for `baton health @FILE`
    and scripts."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Sets the lowest level that is logged."""
    tls_cert: str = ""
    """Names the PEM file of this process's certificate, in place of that in `tls_dir`."""
    tls_key: str = ""
    """Names the PEM file of its key, in place of that in `tls_dir`."""
    tls_ca: str = ""
    """Names the PEM file of the authorities to trust, in place of that in `tls_dir`."""
    max_adapters: int = Field(default=8, ge=1, le=1024)
    """Limits the adapters that are in use at once. Requests for others wait."""
    max_adapter_rank: int = Field(default=_ENGINE.max_adapter_rank, ge=1, le=4096)
    """Limits the rank of an adapter."""
    adapters_host_gib: float = Field(default=_ENGINE.adapters_host_bytes / (1 << 30), gt=0)
    """Limits the host memory of adapters, GiB. Others are read again when they are asked for."""
    synthetic_acceptance: float = Field(default=_ENGINE.synthetic_acceptance, ge=-1, le=1)
    """Accepts drafts with this probability, whatever was drawn: measures speculation with dummy
    weights, on a GPU. What the model says has no meaning then. -1: accepts what is right."""
    failpoints: Annotated[str, AfterValidator(check_failpoints)] = ""
    """Makes this process fail on purpose, for tests alone: NAME=ACTION[:ARG][~KEY][@NTH],..."""


class WorkerSettings(BaseModel):
    """One worker process: engine, KV pool, transfer agent and the services of its role."""

    model_config = SETTINGS
    moved_to_debug: ClassVar = frozenset(
        {
            "page_size_tokens",
            "max_step_tokens",
            "prefix_cache",
            "generation_config",
            "transport",
            "address_file",
            "log_level",
            "tls_cert",
            "tls_key",
            "tls_ca",
        }
    )
    """Settings that stood here until 0.2.0. Their old names are accepted until 0.4.0."""

    role: Role = Role.BOTH
    """Sets the work that routers send to this worker. `both` is a whole server in one process."""
    flexible: bool = False
    """Lets the role change while the worker runs (`baton role`), which reads no
    weights. On a GPU the worker is then prepared for every role, which takes memory of the KV
    pool."""
    name: str = Field(
        default_factory=lambda data: f"{data['role']}-{socket.gethostname()}", min_length=1
    )
    """Names the worker in logs, metrics and the router's list. Give each worker a name of its own:
    routers add a number to a repeated name, new at every start, and warn."""
    model: str = Field(default="demo", min_length=1)
    """Names the folder with config, weights and tokenizer, a GGUF file, or an id of the Hugging
    Face hub such as Qwen/Qwen3-8B. Qwen/Qwen3-8B@REVISION pins its files. `demo` fetches a small
    model."""
    served_name: str = ""
    """Sets the model name that clients use. Empty: the last part of `model`."""
    dtype: Dtype = _ENGINE.dtype
    """Sets the number format of weights and KV. `auto`: bfloat16, and on a CPU float32, which is
    fast there."""
    model_impl: ModelImpl = _ENGINE.model_impl
    """Sets whose code runs the model. `native`: ours, with fused kernels, for the families of
    docs/models.md. `transformers`: that of the installed transformers, over our pages. `auto`:
    ours where it reads the model, else that of transformers."""
    quantization: Quantization = _ENGINE.quantization
    """Rounds the weights of a float checkpoint while they are loaded. `fp8`: FP8 weights with a
    scale for each output channel, and FP8 inputs. Quantised checkpoints need no setting."""
    kv_cache_dtype: KvCacheDtype = _ENGINE.kv_cache_dtype
    """Sets the number format of stored KV. `auto`: that of `dtype`. `fp8` takes half the bytes of
    bfloat16 and needs pages of a multiple of 16 tokens. It must be the same on all workers."""
    device: str = Field(default=_ENGINE.device, pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Sets the device: `auto`, `cpu`, `cuda` or `cuda:N`. `auto`: the first GPU if there is one."""
    tp: int = Field(default=_ENGINE.tp, ge=1, le=MOST_RANKS)
    """Divides the model among so many ranks (tensor parallelism), processes that run each step
    together, on this host or on `nodes`. On GPUs each has one. It must divide the model's heads and
    feed-forward width. It may differ between prefill and decode workers."""
    pp: int = Field(default=_ENGINE.pp, ge=1, le=MOST_RANKS)
    """Divides the model's layers among so many stages (pipeline parallelism), of `tp` ranks each.
    They run different steps at the same time: more prompts a second, and each token as late as with
    one stage. On GPUs each rank has one. It may differ between prefill and decode workers."""
    expert_parallel: bool = _ENGINE.expert_parallel
    """Gives each of `tp` ranks whole experts instead of some of the width of each (expert
    parallelism). `tp` must divide the number of experts, and no longer their width. It may differ
    between prefill and decode workers."""
    nodes: int = Field(default=0, ge=0, le=MOST_RANKS)
    """Divides the ranks among so many hosts, equally many on each. Every host runs the same
    command. They need `tls_dir` and `fabric`. 0: LWS_GROUP_SIZE of LeaderWorkerSet, else 1."""
    node: int = Field(default=-1, ge=-1, lt=MOST_RANKS)
    """Says which of `nodes` this host is. Node 0 is the leader, which is the worker for routers;
    the others start their ranks when it says so. -1: LWS_WORKER_INDEX, or torchrun's NODE_RANK."""
    leader: str = ""
    """Sets the HOST:PORT at which node 0 listens for the other hosts. Without a port: 50070. Empty:
    LWS_LEADER_ADDRESS, or torchrun's MASTER_ADDR."""
    fabric: Fabric = ""
    """Names the network of what hosts of a worker cannot encrypt: activations and KV pages.
    `encrypted:CIDR` says that WireGuard, IPsec or MACsec encrypts it below, `trusted:CIDR` that
    nobody else is on it. Each host listens at its address in it, and nowhere else."""
    expert_group: str = _ENGINE.expert_group
    """Names a folder of this host and a place, FOLDER?rank=R&ranks=N: N workers hold the experts of
    one model together (data-parallel attention). Each has attention whole, and pages, sequences and
    a role of its own. On GPUs rank R takes GPU R, unless `device` names one. Empty: this worker has
    all experts."""
    gpu_slots_dir: str = ""
    """Names a folder that all workers of this host share: each claims a GPU for each of its ranks,
    by lock files in it. Empty: `device` chooses the GPU."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Sets the number of torch's CPU threads, which the ranks of a worker divide. 0: one a core.
    Workers on one machine should divide the cores."""

    listen: Address = "127.0.0.1:0"
    """Sets the address at which routers reach the worker. With port 0 the worker announces the real
    port. An address that other machines reach needs TLS, or `insecure`."""
    advertise: Advertised = ""
    """Sets the address that is announced to routers. Empty or `:0`: `listen`. Set it behind NAT or
    when listening on all interfaces. Port 0 stands for the real port."""
    routers: Addresses = (ROUTER_INTERNAL_ADDRESS,)
    """Lists the internal addresses of routers. The worker announces itself to each until it
    answers, so start order is free. A name stands for all of its addresses and is looked up again
    every five seconds."""
    admin: Address = Field(
        default_factory=lambda data: f"127.0.0.1:{_ADMIN_PORT[data.get('role', Role.BOTH)]}"
    )
    """Sets the address for metrics and health. It is not encrypted, and everybody may read
    there: keep it on loopback, or within a pod."""
    operator_token: str = Field(default="", pattern=r"^[!-~]*$", repr=False)
    """Serves commands that change something at `admin` to callers that show this token. Set it as
    BATON_OPERATOR_TOKEN: others of this host can read command lines. Empty: to nobody."""
    tls_dir: str = ""
    """Names the folder of this process's certificate between routers and workers: `ca.pem`,
    `cert.pem` and `key.pem`, as `baton certs` makes it, or `ca.crt`, `tls.crt` and `tls.key`, as
    cert-manager does. New files take effect by themselves. Empty: no TLS."""
    insecure: bool = False
    """Serves routers of other machines without TLS: for networks where everybody is trusted."""

    kv_memory_gib: float = Field(default=0, ge=0)
    """Sets the memory of each rank's KV pool, GiB. 0: on a GPU the rest of `gpu_memory_utilization`
    beside the largest step, on a CPU 1 GiB."""
    kv_host_gib: float = Field(default=0, ge=0)
    """Sets the host memory for KV pages that the pool evicts or that preempted requests held, GiB.
    They are loaded again where that is sooner than computing them. 0: none."""
    kv_store: Words = ()
    """Lists stores below the host memory, with commas between: `disk:PATH?gib=N`, `dir:PATH?gib=N`,
    `mooncake://HOST:PORT` or an installed package's. They need `kv_host_gib`."""
    kv_secret_file: str = _ENGINE.kv_secret_file
    """Names a file with a secret of at least 16 bytes, the same on all workers. It signs the KV in
    stores to which others can write, which need it."""
    hook: Words = ()
    """Lists hooks, with commas between: `NAME` or `NAME?OPTION=VALUE&OPTION=VALUE`, from installed
    packages. They are called around requests, steps and attention."""
    gpu_memory_utilization: float = Field(default=_ENGINE.gpu_memory_utilization, gt=0, le=1)
    """Limits the share of the GPU's memory that the worker takes in all, if `kv_memory_gib` is
    0."""
    max_sequences: int = Field(default=_ENGINE.max_sequences, ge=1)
    """Limits the sequences that are decoded in one step. More sequences raise the throughput and
    slow down each one."""
    max_context_tokens: int = Field(default=_ENGINE.max_context_tokens, ge=0, le=MOST_TOKENS)
    """Limits prompt and output together. 0: the model's own limit."""
    adapters: Words = ()
    """Lists adapters (LoRA) that are loaded at the start, with commas between: NAME=FOLDER, each a
    folder in peft's format. Requests choose one by its name in place of the model's. Load them on
    prefill and decode workers alike."""
    adapters_dir: str = ""
    """Names a folder. Operators may load adapters from below it while the worker runs (`baton
    adapters`). Empty: from nowhere."""
    speculation: str = _ENGINE.speculation
    """Chooses what guesses tokens, several of which one step then verifies: `suffix` looks for the
    newest tokens earlier in the same sequence, and needs no weights. A folder has an EAGLE-3 head
    for the model. `mtp` is the draft layer of its own checkpoint. The tokens stay the same. A
    prefill worker drafts nothing, and computes what a head or a draft layer keeps of prompts."""
    draft_tokens: int = Field(default=_ENGINE.draft_tokens, ge=1, le=MOST_DRAFTS)
    """Limits the tokens that are guessed at a time."""
    scheduling: Scheduling = _ENGINE.scheduling
    """Chooses the waiting request to admit first: `fcfs` takes the oldest, `priority` the one with
    the highest priority, `shortest` the shortest prompt, `fair` a request of the tenant with the
    fewest running ones. Age counts in `priority` and `shortest`, too."""

    otlp_endpoint: OtlpEndpoint = ""
    """Sets the OTLP/gRPC address for spans, such as http://127.0.0.1:4317. grpcs://HOST:PORT is a
    router's internal port that has TLS. Empty: no spans."""
    log_format: Literal["text", "json"] = "text"
    """Sets the form of the log. `json` writes one object a line, for log collectors."""
    drain_s: float = Field(default=30, ge=0)
    """Sets how long running requests may continue after SIGTERM, seconds."""

    debug: WorkerDebug = Field(default_factory=WorkerDebug)
    """Holds rarely needed settings: the table `[worker.debug]`."""

    @property
    def ranks(self) -> int:
        """Ranks of all stages."""
        return self.pp * self.tp

    @property
    def ranks_here(self) -> int:
        """Ranks of this host."""
        return self.ranks // max(1, self.nodes)

    @property
    def kv_host_bytes(self) -> int:
        """`kv_host_gib` in bytes."""
        return int(self.kv_host_gib * (1 << 30))

    @property
    def kv_memory_bytes(self) -> int:
        """`kv_memory_gib` in bytes."""
        return int(self.kv_memory_gib * (1 << 30))

    @property
    def tls(self) -> TlsFiles:
        """Files of TLS between routers and workers."""
        debug = self.debug
        return files_in(self.tls_dir, debug.tls_ca, debug.tls_cert, debug.tls_key)

    @property
    def is_local(self) -> bool:
        """Whether processes of this machine alone reach the worker."""
        return is_loopback(host_of(self.listen))

    @model_validator(mode="after")
    def _check_exposure(self) -> WorkerSettings:
        check_exposure("listen", self.listen, self.tls, insecure=self.insecure)
        check_receiver(self.otlp_endpoint, self.tls)
        if self.debug.transport == "nccl" and any(self.tls) and not self.is_local:
            raise ValueError(
                "transport nccl opens connections to other machines that TLS does not protect: use"
                " nixl, or listen on loopback"
            )
        return self

    @model_validator(mode="after")
    def _check_choices(self) -> WorkerSettings:
        if self.flexible and self.debug.transport == "nccl":
            raise ValueError("transport nccl cannot serve flexible workers; use nixl")
        if self.gpu_slots_dir and self.device.startswith("cuda:"):
            raise ValueError("device must leave the choice of the GPU to gpu_slots_dir")
        return self

    @model_validator(mode="after")
    def _check_ranks(self) -> WorkerSettings:
        if self.ranks == 1:
            return self
        if self.debug.transport == "nccl":
            raise ValueError(
                "transport nccl cannot serve several ranks; use nixl, or tp 1 and pp 1"
            )
        if self.device.startswith("cuda:") and self.tp > 1:
            raise ValueError("device cuda:N names one GPU for several ranks; use cuda, or tp 1")
        return self

    @model_validator(mode="after")
    def _check_tiers(self) -> WorkerSettings:
        host, stores = self.kv_host_gib > 0, bool(self.kv_store)
        obstacle = tiers_obstacle(host=host, stores=stores, prefix_cache=self.debug.prefix_cache)
        if obstacle:
            raise ValueError(obstacle)
        return self

    @model_validator(mode="after")
    def _check_step_sizes(self) -> WorkerSettings:
        for name in ("max_step_tokens", "mixed_prefill_tokens"):
            if 0 < getattr(self.debug, name) < self.debug.page_size_tokens:
                raise ValueError(f"debug.{name} must be at least debug.page_size_tokens")
        return self


def with_model_found(settings: WorkerSettings, progress: Progress) -> WorkerSettings:
    """The settings with the model's path on this machine and the name under which it is served.
    Fetches the files that are missing.

    Raises:
        DemoModelError, HubError: they cannot be fetched.
    """
    weights = settings.debug.load_format != "dummy"
    found = finding.find(settings.model, progress, weights=weights)
    names = {"model": found.path, "served_name": settings.served_name or found.name}
    return settings.model_copy(update=names)
