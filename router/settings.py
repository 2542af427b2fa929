"""Settings of a router process: one frozen model, validated once, at start."""

from __future__ import annotations

import socket
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from baton.settings import (
    MOST_TOKENS,
    ROUTER_ADDRESS,
    ROUTER_INTERNAL_ADDRESS,
    Address,
    OtlpEndpoint,
)
from telemetry.failpoints import check as check_failpoints


class RouterSettings(BaseSettings):
    """One router process: front doors, queue, dispatcher and registry."""

    model_config = SettingsConfigDict(
        env_prefix="BATON_",
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )

    name: str = Field(default_factory=lambda: f"router-{socket.gethostname()}", min_length=1)
    """Name in logs, traces and the workers' lists of routers."""
    listen: Address = ROUTER_ADDRESS
    """Where clients reach the gRPC API."""
    internal_listen: Address = ROUTER_INTERNAL_ADDRESS
    """Where workers announce themselves. Whoever reaches it can join: keep it off public nets."""
    http_listen: Address = "127.0.0.1:8000"
    """Where clients reach the OpenAI-compatible HTTP API."""
    reuse_port: bool = False
    """Share `listen` and `http_listen` with other routers of this host that do so, too: each new
    connection goes to one of them (`SO_REUSEPORT`). It listens there once it can run a model."""
    admin: Address = "127.0.0.1:9090"
    """Where metrics, health and traces are served."""
    auth_tokens_file: str = ""
    """TOML file of `"token" = "tenant"` lines: who may call, and as whom. Empty: everybody may."""

    policy: Literal["least_work", "round_robin"] = "least_work"
    """How workers are chosen. `round_robin` ignores load: good for comparisons only."""
    local_prefill: Literal["never", "cached", "auto"] = "cached"
    """When a decode worker computes a prompt by itself. `cached`: it holds the larger part already,
    or no prefill worker is left. `auto`: also when it would be sooner than the queue at prefill."""
    local_prefill_tokens: int = Field(default=192, ge=0, le=MOST_TOKENS)
    """Longest rest of a prompt that a decode worker computes where it holds the larger part."""
    urgent_factor: float = Field(default=2.8, ge=1, le=1000)
    """A prompt is urgent whose first token would come after so many times what it takes by itself,
    wherever it is computed: a decode worker with a `mixed_late_share` hurries it. A little less
    than what a p99 may be. Smaller, and the budget is spent on those that wait less."""
    max_queued_requests: int = Field(default=1024, ge=1)
    """Requests of one model waiting in the router; one more is refused at once."""
    max_queued_tokens: int = Field(default=2_000_000, ge=1)
    """Prompt tokens of one model waiting in the router: bounds the wait where prompts are long."""
    queue_timeout_s: float = Field(default=60, gt=0)
    """Longest wait in the router's queue, seconds."""
    max_retries: int = Field(default=2, ge=0, le=10)
    """Further attempts at a request after a refusal or an error that cost no worker."""
    max_workers_lost: int = Field(default=2, ge=1, le=10)
    """Workers that may be lost with a request in hand; then it ends: it may be what kills them."""
    resume_grace_s: float = Field(default=10, ge=0)
    """How long a stream whose tokens were sent waits, where no worker is left, for one to come."""
    stale_after_s: float = Field(default=3, ge=1)
    """A worker whose progress counter stands still this long is taken for frozen, seconds."""
    attach_timeout_s: float = Field(default=3, gt=0)
    """Longest wait for a worker's answer when a stream to it is opened, seconds."""

    max_request_duration_s: float = Field(default=600, gt=0)
    """Deadline of requests whose client set none, and the longest allowed, seconds."""
    default_max_tokens: int = Field(default=1024, ge=1, le=MOST_TOKENS)
    """`max_tokens` of requests that set none, where the context leaves as many."""
    max_output_tokens: int = Field(default=32_768, ge=1, le=MOST_TOKENS)
    """Largest `max_tokens` accepted, where the context leaves as many."""
    max_choices: int = Field(default=16, ge=1, le=1024)
    """Largest number of choices of a request."""
    tokenizer_threads: int = Field(default=2, ge=1)
    """Threads that tokenize prompts; those over 64 KB have one more, which they share."""

    otlp_endpoint: OtlpEndpoint = ""
    """OTLP/gRPC address for spans, such as http://127.0.0.1:4317. Empty: no spans."""
    trace_store: bool = False
    """Keep the latest traces in memory; the internal port then takes spans over OTLP."""
    max_stored_traces: int = Field(default=256, ge=1)
    """Traces kept by the trace store; older ones go first."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe line that is logged."""
    log_format: Literal["text", "json"] = "text"
    """`json` writes one object a line, for log collectors."""
    drain_grace_s: float = Field(default=1, ge=0)
    """Seconds of serving on after SIGTERM, while health already sends new clients elsewhere."""
    drain_s: float = Field(default=30, ge=0)
    """Seconds that running requests get to finish after that."""
    failpoints: Annotated[str, AfterValidator(check_failpoints)] = ""
    """Where this process fails on purpose, for tests alone: NAME=ACTION[:ARG][~KEY][@NTH],..."""
