"""Settings of a worker process, and how every process reads its settings.

Flags beat the environment (`BATON_*`), the environment beats the file, the file beats the
defaults: `resolve` merges the four once, at start, into one frozen model; nothing reads the
environment after that. `baton config` prints the result and where each value came from.

The file is TOML, one table a process kind: `[worker]` and `[router]`. It is the one named by
`--config`, else by `BATON_CONFIG`, else `baton.toml` in the working directory, where there is one.

Settings that few need are in a table of their own, `[worker.debug]` and `[router.debug]`: the
variables `BATON_DEBUG_*` set them, no flags do.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Generic, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from baton.addresses import port_of
from telemetry.failpoints import check as check_failpoints

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic.fields import FieldInfo

CONFIG_VARIABLE: Final = "BATON_CONFIG"
DEFAULT_FILE: Final = Path("baton.toml")
TABLES: Final = ("router", "worker")
"""Of the file."""
PREFIX: Final = "BATON_"
DEBUG_PREFIX: Final = "BATON_DEBUG_"
"""Of the variables of the environment."""
DEBUG: Final = "debug"
"""The table within a table, and the field, of settings that few need."""
ROUTER_ADDRESS: Final = "127.0.0.1:50051"
"""Where a router serves clients unless told otherwise."""
ROUTER_INTERNAL_ADDRESS: Final = "127.0.0.1:50050"
"""Where workers announce themselves unless told otherwise."""

Settings = TypeVar("Settings", bound=BaseModel)


class SettingsError(Exception):
    """Settings that cannot be used; the message names the field and says what is wrong."""


class Role(StrEnum):
    """What a worker does. Every worker can do both: the role decides what routers send it."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


def _split(value: object) -> object:
    """`a,b` and a list of such strings are both lists."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        return value
    return tuple(item.strip() for part in parts for item in str(part).split(",") if item.strip())


def _host_and_port(value: str) -> str:
    """`HOST:PORT`, `[V6]:PORT`; port 0 lets the system choose."""
    if port_of(value) is None:
        raise ValueError("must be HOST:PORT")
    return value


def _own_or_other(value: str) -> str:
    """As above, or nothing of it; `:0` is what is left where a file puts no host before it."""
    return value if value in ("", ":0") else _host_and_port(value)


_RECEIVER: Final = re.compile(r"(https?://)?([^\s/@]+)/?")
"""Its scheme and its address."""


def _receiver(value: str) -> str:
    """Where spans go, or nothing; with TLS there is a usual port. Whether somebody answers there
    shows later."""
    scheme, address = found.groups() if (found := _RECEIVER.fullmatch(value)) else ("", "")
    has_usual_port = scheme == "https://" and ":" not in address
    if value and not has_usual_port and not port_of(address):
        raise ValueError(
            "must be http://HOST:PORT, https://HOST:PORT or HOST:PORT, with no path: "
            "spans go over gRPC"
        )
    return value


Address = Annotated[str, AfterValidator(_host_and_port)]
OtlpEndpoint = Annotated[str, AfterValidator(_receiver)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_split)]

_ADMIN_PORT: Final = {Role.PREFILL: 9091, Role.DECODE: 9092, Role.BOTH: 9093}


MOST_TOKENS: Final = 1 << 24
"""Of whatever is counted in tokens: far more than any context, and fit for every message."""


SETTINGS: Final = ConfigDict(
    frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
)
"""How every settings model behaves."""


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
    advertise: Annotated[str, AfterValidator(_own_or_other)] = ""
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


class Resolved(NamedTuple, Generic[Settings]):
    """Settings and, per field, where the value came from."""

    settings: Settings
    sources: Mapping[str, str]
    """"flag", the environment variable's name, the file's path or "default". Fields of the table
    `debug` are named `debug.FIELD`."""


def resolve(
    kind: type[Settings], table: str, flags: Mapping[str, Any], file: Path | None = None
) -> Resolved[Settings]:
    """Merges flags, environment, file and defaults.

    Args:
        kind: the settings model.
        table: its table in the file.
        flags: what the command line set; None counts as not set.
        file: None: `BATON_CONFIG`, else `baton.toml` where it exists.

    Raises:
        SettingsError: the file cannot be read, or a value does not fit its field.
    """
    path = _file(file)
    from_file = _table(path, table) if path else {}
    given = {name: value for name, value in flags.items() if value is not None}
    tables = (from_file.pop(DEBUG, {}), given.pop(DEBUG, {}))
    if not all(isinstance(content, dict) for content in tables):
        raise SettingsError(f"{table}: `{DEBUG}` must be a table")
    values, sources = _merge(kind, from_file, given, str(path), PREFIX)
    debug, debug_sources = _merge(debug_settings(kind), *tables, str(path), DEBUG_PREFIX)
    try:
        settings = kind(**values, debug=debug)
    except ValidationError as error:
        raise SettingsError(_explain(error, table, kind)) from None
    sources |= {f"{DEBUG}.{name}": source for name, source in debug_sources.items()}
    return Resolved(settings, dict.fromkeys(fields(kind), "default") | sources)


def _merge(
    kind: type[BaseModel], from_file: dict[str, Any], given: dict[str, Any], path: str, prefix: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """What was set of one table, and by whom."""
    environment = {name.upper(): value for name, value in os.environ.items()}
    variables = {name: f"{prefix}{name}".upper() for name in kind.model_fields if name != DEBUG}
    set_ones = {name: variable for name, variable in variables.items() if variable in environment}
    from_environment = {name: environment[variable] for name, variable in set_ones.items()}
    sources = dict.fromkeys(from_file, path) | set_ones | dict.fromkeys(given, "flag")
    return {**from_file, **from_environment, **given}, sources


def debug_settings(kind: type[BaseModel]) -> type[BaseModel]:
    """The model of a process's table `debug`."""
    debug = kind.model_fields[DEBUG].annotation
    assert isinstance(debug, type), "a table of settings"
    assert issubclass(debug, BaseModel), "a table of settings"
    return debug


def fields(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """All settings of a process; those of the table `debug` as `debug.FIELD`."""
    named = {name: field for name, field in kind.model_fields.items() if name != DEBUG}
    debug = debug_settings(kind).model_fields
    return named | {f"{DEBUG}.{name}": field for name, field in debug.items()}


def _file(named: Path | None) -> Path | None:
    if named is None and (variable := os.environ.get(CONFIG_VARIABLE)):
        named = Path(variable)
    if named is None:
        return DEFAULT_FILE if DEFAULT_FILE.is_file() else None
    return named


def _table(path: Path, table: str) -> dict[str, Any]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None
    for name in tables.keys() - set(TABLES):
        raise SettingsError(f"{path}: `{name}` is neither [router] nor [worker]")
    content = tables.get(table, {})
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: [{table}] must be a table")
    return content


def nearest(name: str, known: Iterable[str]) -> str:
    """What may have been meant by a name that is not known, as the end of a message."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return f" (did you mean `{found[0]}`?)" if found else ""


def _explain(error: ValidationError, table: str, kind: type[BaseModel]) -> str:
    """One line per wrong field, in the words of the command line."""
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or table
        if problem["type"] == "default_factory_not_called":
            continue  # follows from another problem
        if problem["type"] == "missing":
            lines.append(f"{table}: `{field}` is not set (--{field.replace('_', '-')})")
        elif problem["type"] == "extra_forbidden":
            lines.append(f"{table}: there is no setting `{field}`{_hint(field, kind)}")
        else:
            rule = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{table}: `{field}`: {rule} (got {problem['input']!r})")
    return "\n".join(lines)


def _hint(field: str, kind: type[BaseModel]) -> str:
    """What to write for a setting that is not known."""
    if f"{DEBUG}.{field}" in fields(kind):
        return f" (it is in the table `{DEBUG}`)"
    return nearest(field, fields(kind))
