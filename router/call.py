"""A call of a front door's method: who calls, until when, and its line in the access log.

The log has one line for each request, with its outcome and without its content. The edge that takes
the request opens a record. Other parts note their facts in it. The edge writes it when the call is
over. Times are seconds. An HTTP request with several prompts sums them up.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import secrets
import time
import uuid
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from opentelemetry.context import Context

from router import errors
from router.jobs import NO_QUOTA, Quota

if TYPE_CHECKING:
    from router.jobs import JobTimings

logger = logging.getLogger("baton.access")

_PHASES = ("queue", "prefill", "kv_transfer", "decode_queue", "decode")
"""The phases of `JobTimings`, in order."""
_IPV6: Final = 6
_OWN_BITS: Final = 64
MACHINES: Final = 1024
"""Addresses of callers that are kept as they were read; not tuned."""
_DEADLINE_SLACK_S: Final = 0.1
"""Tolerance for a deadline, seconds. A caller's deadline passes before ours, because its call took
some time to arrive."""


class Caller(NamedTuple):
    """Whom a token stands for."""

    tenant: str = ""
    """"" where nobody is asked for a token."""
    quota: Quota = NO_QUOTA
    is_alone: bool = True
    """There is no other tenant, so that calls are what share the workers."""
    models: frozenset[str] | None = None
    """Names of the models and adapters that it may use; None: all (`router.visible`)."""


class Peer(NamedTuple):
    """The other end of a call's connection."""

    address: str = ""
    """Address of its machine; of IPv6 the network of 64 bits, which one machine may have for
    itself."""
    connection: str = ""
    is_local: bool = True
    """Whether it is this machine, so that its address tells no callers apart."""

    @classmethod
    def of(cls, host: str, port: int) -> Peer:
        """The peer at an address; one that is no IP address is local."""
        name, is_local = _machine(host)
        return cls(name, f"{name}:{port}", is_local)


NO_PEER: Final = Peer()


@lru_cache(MACHINES)
def _machine(host: str) -> tuple[str, bool]:
    """The machine's address, and whether it is this machine."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host, True
    if address.version == _IPV6 and not address.is_loopback:
        return str(ipaddress.ip_network((address, _OWN_BITS), strict=False)), False
    return str(address), address.is_loopback


@dataclass(slots=True)
class AccessRecord:
    """The facts logged about one request."""

    method: str = ""
    """`package.Service/Method`, or verb and route. The edge sets it, and `tenant`."""
    tenant: str = ""
    client_tag: str = ""
    """The generation sets this field and all below."""
    model: str = ""
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    first_token_s: float | None = None
    """Time from the arrival to the first token; None if none was sent."""
    phases_s: dict[str, float] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)
    """Workers that got a part of it, in order, once for each attempt. The dispatcher sets it."""

    def add_timings(self, timings: JobTimings) -> None:
        """Adds the phases of a generation."""
        for phase in _PHASES:
            seconds = getattr(timings, f"{phase}_ns") / 1e9
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds

    def write(self, trace_id: str, arrived_ns: int, status: str | int, reason: str = "") -> None:
        """Writes the line.

        Args:
            trace_id: the trace id of the call.
            arrived_ns: Unix nanoseconds.
            status: name of the gRPC code, or the HTTP status.
            reason: a reason of the error table; "" if the answer was complete.
        """
        line: dict[str, object] = {
            "trace_id": trace_id,
            "method": self.method,
            "status": status,
            "reason": reason,
            "tenant": self.tenant,
            "client_tag": self.client_tag,
            "model": self.model,
            "prompt_tokens": self.prompt_tokens,
            "cached_prompt_tokens": self.cached_prompt_tokens,
            "output_tokens": self.output_tokens,
            "finish_reasons": self.finish_reasons,
            "workers": self.workers,
            "duration_s": round((time.time_ns() - arrived_ns) / 1e9, 6),
        }
        if self.first_token_s is not None:
            line["first_token_s"] = round(self.first_token_s, 6)
        line |= {f"{phase}_s": round(seconds, 6) for phase, seconds in self.phases_s.items()}
        logger.info("request", extra=line)


class MessageWay(Protocol):
    """Takes messages of a stream to its caller at once."""

    def take(self, message: bytes) -> bool:
        """Sends a message now; False if it must wait for room."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a front door's method."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Trace id of the call's span, 32 hex digits; random if nothing is traced."""
    arrived_ns: int = field(default_factory=time.time_ns)
    began_s: float = field(default_factory=time.monotonic)
    """When it arrived, by the steady clock."""
    time_left_s: float | None = None
    """Time until the caller's deadline; None if it set none."""
    longest_s: float = math.inf
    """Time until the router's own deadline."""
    context: Context = field(default_factory=Context)
    """Holds the span of the call."""
    tenant: str = ""
    """Whom the caller's token stands for; "" where nobody is asked for one."""
    quota: Quota = NO_QUOTA
    """The tenant's."""
    holder: str = ""
    """Who holds the slots that the call takes; see `router.jobs.Job`."""
    models: frozenset[str] | None = None
    """What the caller may use; see `Caller`."""
    peer: Peer = NO_PEER
    """Where it comes from."""
    record: AccessRecord = field(default_factory=AccessRecord)
    whole: bool = False
    """The caller wants the answer in one message, so its tokens need not be read one by one."""
    is_batch: bool = False
    """It is a line of a batch: nobody waits for its answer."""
    way: MessageWay | None = None
    """Takes messages of its stream at once, where the door can; see `router.doors.straight`."""

    @property
    def passed_s(self) -> float:
        """Time since its arrival, seconds."""
        return (time.time_ns() - self.arrived_ns) / 1e9

    @property
    def sharer(self) -> str:
        """Who takes turns with others at what a router has little of: the tenant; without one who
        is behind the address; on this machine the connection."""
        peer = self.peer
        return self.tenant or (peer.connection if peer.is_local else peer.address) or self.id

    def answer_id(self, prefix: str) -> str:
        """An id of an answer's own. It has the trace id, which all requests of a trace share."""
        return f"{prefix}{self.id}{secrets.token_hex(4)}"

    def admitted(self, caller: Caller) -> Call:
        """The call, with the tenant of its token."""
        self.record.tenant = caller.tenant
        holder = self.id if caller.is_alone else caller.tenant
        return replace(
            self,
            tenant=caller.tenant,
            quota=caller.quota,
            holder=holder,
            models=caller.models,
        )

    def with_way(self, way: MessageWay | None) -> Call:
        """The call, with a short way if there is one."""
        return self if way is None else replace(self, way=way)

    def left(self) -> errors.RouterError:
        """The error for a caller that is gone. gRPC reports a deadline and a cancellation alike."""
        left_s = self.longest_s if self.time_left_s is None else self.time_left_s
        if self.passed_s > min(left_s, self.longest_s) - _DEADLINE_SLACK_S:
            return errors.deadline_exceeded(self.record.output_tokens)
        return errors.cancelled()
