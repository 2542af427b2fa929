"""The access log: one line for each request, with its outcome and without its content.

The edge that takes the request opens a record. Other parts note their facts in it. The edge writes
it when the call is over. Times are seconds. An HTTP request with several prompts sums them up.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.jobs import JobTimings

logger = logging.getLogger("baton.access")

_PHASES = ("queue", "prefill", "kv_transfer", "decode_queue", "decode")
"""The phases of `JobTimings`, in order."""


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
