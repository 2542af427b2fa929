"""What `baton up` and `baton demo` are asked to run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton.addresses import is_loopback
from console.ports import HOST
from worker.settings import Role

Device = Literal["auto", "cpu", "cuda"]


class UpError(Exception):
    """The wanted processes cannot run here, or did not start."""


class UpUseError(UpError):
    """The options make no sense together, on whatever machine."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The processes to run. Port 0: any free one; None: the usual port or the next free one."""

    model: str
    """Its folder or GGUF file on this machine."""
    served_name: str = ""
    """The name that clients use; "": the last part of `model`."""
    prefill: int = 1
    decode: int = 1
    both: int = 0
    routers: int = 1
    tp: int = 1
    """Ranks of each stage of each worker."""
    pp: int = 1
    """Stages of each worker."""
    tp_of: Mapping[Role, int | None] = field(default_factory=dict)
    """`tp` of workers of a role, where it differs."""
    pp_of: Mapping[Role, int | None] = field(default_factory=dict)
    """`pp` of workers of a role, where it differs."""
    share_experts: bool = False
    """Whether the workers of a role hold a model's experts together, where there are several."""
    device: Device = "auto"
    trace: bool = True
    """Whether every process sends its spans to the first router's trace store."""
    otlp_endpoint: str = ""
    """Where spans go instead; "": nowhere else."""
    host: str = HOST
    """The address of this machine at which clients are served over gRPC."""
    http_host: str = ""
    """HTTP address for clients; "": that of `host`."""
    api_key: str = ""
    """What clients must show; "": nothing, or what `has_tokens` says."""
    has_tokens: bool = False
    """Whether the routers' own settings let in callers with a token alone."""
    grpc_port: int | None = None
    http_port: int | None = None
    admin_port: int | None = None
    kv_memory_gib: float | None = None
    chat_template: str | None = None
    """A Jinja file that replaces the model's own; None: as the routers' settings say."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for all workers on it."""
    drain_s: float = 30.0
    """Seconds that running requests may continue when everything is stopped."""
    certs: str = ""
    """A folder that `baton certs` made: TLS between all processes and towards clients."""

    def __post_init__(self) -> None:
        """Raises UpUseError if everybody who reaches this machine would be served, or experts
        cannot be shared."""
        if obstacle := self._sharing_obstacle():
            raise UpUseError(f"--share-experts {obstacle}")
        hosts = (self.host, self.http_host or self.host)
        if self.asks_for_key or all(map(is_loopback, hosts)):
            return
        host = next(host for host in hosts if not is_loopback(host))
        raise UpUseError(
            f"at {host} everybody who reaches this machine would be served: set BATON_API_KEY or "
            "--api-key, which clients then show"
        )

    def _sharing_obstacle(self) -> str:
        """Why workers cannot share experts as asked; empty: they can, or shall not."""
        if not self.share_experts:
            return ""
        if max(self.prefill, self.decode, self.both) < 2:
            return "needs two or more workers of a role: --prefill, --decode or --both"
        if any(self.ranks_of(role) > 1 for role in Role):
            return "needs --tp 1 and --pp 1: the workers of a role are the ranks"
        return ""

    @property
    def asks_for_key(self) -> bool:
        """Whether clients must show a key or a token."""
        return bool(self.api_key) or self.has_tokens

    def ranks_of(self, role: Role) -> int:
        """Ranks of each worker of a role, of all stages."""
        return math.prod(self.grid_of(role))

    def grid_of(self, role: Role) -> tuple[int, int]:
        """Stages of each worker of a role, and ranks of each stage."""
        return self.pp_of.get(role) or self.pp, self.tp_of.get(role) or self.tp
