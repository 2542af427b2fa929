"""Settings of a router process: one frozen model, validated once, at start."""

from __future__ import annotations

import socket
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, Field, model_validator

from baton.addresses import ROUTER_ADDRESS, ROUTER_INTERNAL_ADDRESS
from baton.tls import TlsFiles, files_in
from faults.failpoints import check as check_failpoints
from router.split_names import SplitNames
from serving.net.internal_net import check_exposure, check_receiver
from serving.settings import MOST_TOKENS, SETTINGS, Address, AddressOrNone, OtlpEndpoint, Words


def _split(stated: Words) -> Words:
    SplitNames(stated)
    return stated


LocalPrefill = Literal["never", "cached", "auto"]
"""The cases in which decode workers compute prompts."""


class Thresholds(NamedTuple):
    """When to move a worker."""

    high: float = 1.3
    low: float = 0.8
    hold_s: float = 60.0
    apart_s: float = 300.0
    prefill: float = 0.6
    """Target: part of the time in which a prefill worker computes."""
    decode: float = 0.75
    """Target: part of the tokens a second that a decode worker could have."""

    def contradiction(self) -> str:
        """Why these cannot be; "" if they can."""
        if not self.low < 1 < self.high:
            return (
                f"balance_low {self.low} must be below 1 and balance_high {self.high} above: 1 is "
                "a pool at its target, so else one and the same load would move workers both ways"
            )
        if self.apart_s < self.hold_s:
            return (
                f"balance_apart_s {self.apart_s:g} must be at least balance_hold_s "
                f"{self.hold_s:g}: what a change does must be seen before the next one"
            )
        return ""


class RouterDebug(BaseModel):
    """Rarely needed settings of a router: the table `[router.debug]`, `BATON_DEBUG_*`, no flags.

    They may change from one release to the next.
    """

    model_config = SETTINGS

    max_choices: int = Field(default=16, ge=1, le=1024)
    """Limits the number of choices of a request."""
    max_retries: int = Field(default=2, ge=0, le=10)
    """Limits the further attempts at a request after a refusal or an error without a lost
    worker."""
    max_workers_lost: int = Field(default=2, ge=1, le=10)
    """Ends a request that has lost this many workers: it may be the cause of their deaths."""
    stale_after_s: float = Field(default=3, ge=1)
    """Takes a worker for frozen when its progress counter stands still this long, seconds."""
    attach_timeout_s: float = Field(default=3, gt=0)
    """Limits the wait for a worker's answer when a stream to it is opened, seconds."""
    tokenizer_threads: int = Field(default=2, ge=1)
    """Sets the number of threads that tokenize prompts. Texts over 64 KB share one more."""
    max_stored_traces: int = Field(default=256, ge=1)
    """Limits the number of traces in the trace store. The oldest are dropped first."""
    reflection: bool = True
    """Describes the gRPC API to clients that ask (server reflection)."""
    door_metrics: bool = True
    """Shows `/metrics` at the HTTP address for clients, too."""
    responses_mib: int = Field(default=256, ge=64)
    """Limits the bytes of the responses of one tenant that are kept, MiB. The ones used longest ago
    go first."""
    responses_most: int = Field(default=10_000, ge=1)
    """Limits the number of responses of one tenant that are kept."""
    responses_days: float = Field(default=30, gt=0)
    """Limits how long a response is kept after its last use, days."""
    files_mib: int = Field(default=1024, ge=1)
    """Limits the bytes of the files of one tenant that are kept, MiB. Beyond that uploads are
    refused, and batches stop."""
    files_most: int = Field(default=1000, ge=1)
    """Limits the number of files of one tenant that are kept, and that of batches."""
    files_days: float = Field(default=30, gt=0)
    """Limits how long a file, and an ended batch, is kept, days."""
    batch_requests: int = Field(default=32, ge=1)
    """Limits the requests of one batch that are under way at the same time."""
    max_queued_tokens: int = Field(default=2_000_000, ge=1)
    """Limits the prompt tokens of one model that wait in the router. This bounds the wait if
    prompts are long."""
    resume_grace_s: float = Field(default=60, ge=0)
    """Sets how long a begun stream waits for a worker to come back if none is left, seconds. If all
    workers left in order, the stream ends at once."""
    balance_high: float = Field(default=1.3, gt=0)
    """Moves a worker to a pool whose use exceeds its target this many times, if the other pool is
    below `balance_low`. Only with `balance`, as the next ones."""
    balance_low: float = Field(default=0.8, ge=0)
    """Takes a worker from a pool whose use is below this part of its target."""
    balance_hold_s: float = Field(default=60, ge=0)
    """Sets how long both must hold before a worker moves, seconds."""
    balance_apart_s: float = Field(default=300, ge=0)
    """Sets the least time between two changes of the roles of a model's workers, seconds."""
    drain_grace_s: float = Field(default=1, ge=0)
    """Sets how long the router accepts requests after SIGTERM, seconds. Its health check already
    fails, so that new clients go elsewhere."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Sets the lowest level that is logged."""
    tls_cert: str = ""
    """Names the PEM file of this process's certificate, in place of that in `tls_dir`."""
    tls_key: str = ""
    """Names the PEM file of its key, in place of that in `tls_dir`."""
    tls_ca: str = ""
    """Names the PEM file of the authorities to trust, in place of that in `tls_dir`."""
    failpoints: Annotated[str, AfterValidator(check_failpoints)] = ""
    """Makes this process fail on purpose, for tests alone: NAME=ACTION[:ARG][~KEY][@NTH],..."""


class RouterSettings(BaseModel):
    """One router process: front doors, queue, dispatcher and registry."""

    model_config = SETTINGS
    moved_to_debug: ClassVar = frozenset(
        {
            "reflection",
            "door_metrics",
            "max_queued_tokens",
            "resume_grace_s",
            "drain_grace_s",
            "log_level",
            "tls_cert",
            "tls_key",
            "tls_ca",
        }
    )
    """Settings that stood here until 0.2.0. Their old names are accepted until 0.4.0."""

    name: str = Field(default_factory=lambda: f"router-{socket.gethostname()}", min_length=1)
    """Names the router in logs, traces and the workers' lists of routers."""
    listen: Address = ROUTER_ADDRESS
    """Sets the address of the gRPC API for clients."""
    internal_listen: Address = ROUTER_INTERNAL_ADDRESS
    """Sets the address at which workers announce themselves. Without TLS any process that reaches
    it can join, so an address that other machines reach needs TLS, or `insecure`."""
    http_listen: Address = "127.0.0.1:8000"
    """Sets the address of the OpenAI-compatible HTTP API for clients."""
    fast_listen: AddressOrNone = ""
    """Sets the address of the fast door: the gRPC API again, where a token of a stream takes less
    of the router's time. Empty: there is none."""
    reuse_port: bool = False
    """Shares `listen`, `http_listen` and `fast_listen` with other routers of this host that set
    this, too. Each new connection goes to one of them (`SO_REUSEPORT`). The router listens there
    once it can run a model."""
    admin: Address = "127.0.0.1:9090"
    """Sets the address for metrics, health and traces. It is not encrypted, and everybody may read
    there: keep it on loopback, or within a pod."""
    operator_token: str = Field(default="", pattern=r"^[!-~]*$", repr=False)
    """Serves commands that change something at `admin` to callers that show this token. Set it as
    BATON_OPERATOR_TOKEN: others of this host can read command lines. Empty: to nobody."""
    tls_dir: str = ""
    """Names the folder of this process's certificate between routers and workers: `ca.pem`,
    `cert.pem` and `key.pem`, as `baton certs` makes it, or `ca.crt`, `tls.crt` and `tls.key`, as
    cert-manager does. New files take effect by themselves. Empty: no TLS."""
    insecure: bool = False
    """Serves workers of other machines without TLS: for networks where everybody is trusted."""
    tls_door_cert: str = ""
    """Names the PEM file of the certificate that clients see, over gRPC and HTTP. A new file takes
    effect by itself. Empty: clients are served in clear."""
    tls_door_key: str = ""
    """Names the PEM file of its key."""
    tls_client_ca: str = ""
    """Serves only clients with a certificate of an authority in this PEM file. Empty: clients need
    none."""
    model_dirs: Words = ()
    """Lists folders, with commas between them. Tokenizers are read below these alone: where the
    worker read its model, or in a folder of the model's name. Empty: wherever the worker says, if
    `internal_listen` is a loopback address, and nowhere otherwise."""
    allowed_origins: Words = ()
    """Lists origins of web pages that may call the HTTP API, such as https://chat.example, with
    commas between them. `*` is any. Empty: no page of another origin may."""
    api_key: str = Field(default="", pattern=r"^[!-~]*$", repr=False)
    """Serves only callers that show this key, as OpenAI's clients show theirs. Set it as
    BATON_API_KEY: others of this host can read command lines. Empty: no key is asked for."""
    auth_tokens_file: str = ""
    """Names a TOML file with lines `"token" = "tenant"`: only callers with one of these tokens are
    served, each as its tenant. Empty: no token is asked for."""

    split_names: Annotated[Words, AfterValidator(_split)] = ()
    """Splits requests for a name among models, by weights, such as chat=a:90+b:10: for comparing
    them on real requests. A conversation stays with its model."""
    chat_template: str = ""
    """Names a Jinja file that replaces the chat template of every model."""

    responses_folder: str = ""
    """Names a folder in which `/v1/responses` keeps responses, with their prompts, for
    `previous_response_id`. It is made with mode 0700. Routers of one host may share it. Empty:
    nothing is kept."""
    batches_folder: str = ""
    """Names a folder in which `/v1/files` and `/v1/batches` keep requests and results. It is made
    with mode 0700. Routers of one host may share it. Empty: there are no files and batches."""

    local_prefill: LocalPrefill = "cached"
    """Sets when a decode worker computes a new prompt itself. `cached`: if it holds the larger part
    already and would finish the rest sooner than a prefill worker the whole, or if no prefill
    worker is left. `auto`: also if it would finish sooner than any prefill worker. `never`: in no
    case."""
    balance: Literal["off", "auto"] = "off"
    """Changes roles of workers with `flexible`. `auto`: where prefill or decode workers are short
    and the others have time. Of several routers that do this the first by name does it."""
    max_queued_requests: int = Field(default=1024, ge=1)
    """Limits the requests of one model that wait in the router. Further ones are refused at
    once."""
    queue_timeout_s: float = Field(default=60, gt=0)
    """Limits the wait in the router's queue, seconds."""

    max_request_duration_s: float = Field(default=600, gt=0)
    """Limits the duration of every request, and is the deadline of those that set none, seconds."""
    default_max_tokens: int = Field(default=1024, ge=1, le=MOST_TOKENS)
    """Sets `max_tokens` of requests that set none. The context may leave fewer."""
    max_output_tokens: int = Field(default=32_768, ge=1, le=MOST_TOKENS)
    """Limits `max_tokens` of a request. The context may leave fewer."""

    otlp_endpoint: OtlpEndpoint = ""
    """Sets the OTLP/gRPC address for spans, such as http://127.0.0.1:4317. grpcs://HOST:PORT is a
    router's internal port that has TLS. Empty: no spans."""
    trace_store: bool = False
    """Keeps the latest traces in memory. The internal port then accepts spans over OTLP."""
    log_format: Literal["text", "json"] = "text"
    """Sets the form of the log. `json` writes one object a line, for log collectors."""
    drain_s: float = Field(default=30, ge=0)
    """Sets how long running requests may continue behind `debug.drain_grace_s`, seconds."""
    debug: RouterDebug = Field(default_factory=RouterDebug)
    """Holds rarely needed settings: the table `[router.debug]`."""

    @property
    def tls(self) -> TlsFiles:
        """Files of TLS between routers and workers."""
        debug = self.debug
        return files_in(self.tls_dir, debug.tls_ca, debug.tls_cert, debug.tls_key)

    @property
    def door_tls(self) -> TlsFiles:
        """Files of TLS towards clients."""
        return TlsFiles(self.tls_client_ca, self.tls_door_cert, self.tls_door_key)

    @model_validator(mode="after")
    def _check_exposure(self) -> RouterSettings:
        files = self.tls
        check_exposure("internal_listen", self.internal_listen, files, insecure=self.insecure)
        check_receiver(self.otlp_endpoint, files)
        return self

    @model_validator(mode="after")
    def _check_door_certificate(self) -> RouterSettings:
        ca, cert, key, _ = self.door_tls
        if bool(cert) != bool(key) or (ca and not cert):
            raise ValueError(
                "set tls_door_cert and tls_door_key together; tls_client_ca needs both"
            )
        return self

    @property
    def balance_thresholds(self) -> Thresholds:
        """When to move a worker to the other role."""
        debug = self.debug
        return Thresholds(
            debug.balance_high, debug.balance_low, debug.balance_hold_s, debug.balance_apart_s
        )

    @model_validator(mode="after")
    def _check_balance(self) -> RouterSettings:
        if why := self.balance_thresholds.contradiction():
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _check_callers(self) -> RouterSettings:
        if self.api_key and self.auth_tokens_file:
            raise ValueError("set api_key or auth_tokens_file, not both")
        return self
