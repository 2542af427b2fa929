"""Jobs, which the front doors hand to the dispatcher, and the events that come back.

A *job* is one request after validation and tokenization. A front door creates it and awaits
`Dispatcher.run(job, send)`; while that runs, `send` is called with:

1. `JobStarted`, once, when the first token is known;
2. `JobTokens`, per choice without gap or duplicate, and `ChoiceEnded`, once per choice after its
   last token, unless the front door ended that choice itself (`Dispatcher.end_choice`);
3. `JobFinished`, once every choice has ended, and then `run` returns.

If the job cannot be finished, `run` raises a `RouterError`. Cancelling `run` at any point cancels
the work. Failover is invisible here: a resumed job goes on at the next index.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from prefixes.keys import NO_KEYS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from opentelemetry.context import Context

    from baton.worker.v1 import worker_pb2
    from prefixes.keys import ShortKeys


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that at least one attached worker serves."""

    name: str
    revision: str
    path: str
    """Folder with config and tokenizer."""
    max_context_tokens: int
    """Prompt and output together."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size_tokens: int
    kv_precision: str = ""
    """See `prefixes.keys`."""
    prefix_cache: bool = False
    """Whether its workers find pages of prompts again."""
    extensions: frozenset[str] = frozenset()
    """Hooks for which requests may carry bytes."""
    sampling: worker_pb2.SamplingDefaults | None = field(default=None, compare=False)
    """How it wants to be sampled where a request does not say."""
    pooling: worker_pb2.PoolingDefaults | None = field(default=None, compare=False)
    """How it pools where a request does not say; None: its workers pool nothing."""
    adapter: str = ""
    """Name of the adapter that changes it; empty: none."""
    digest: bytes = b""
    """The adapter's content."""

    @property
    def called(self) -> str:
        """The name by which requests choose it."""
        return self.adapter or self.name

    @classmethod
    def of(cls, model: worker_pb2.ModelInfo) -> Self:
        """The model that a worker announced."""
        return cls(
            name=model.name,
            revision=model.revision,
            path=model.path,
            max_context_tokens=model.max_context_tokens,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            page_size_tokens=model.page_size_tokens,
            kv_precision=model.kv_precision,
            prefix_cache=model.prefix_cache,
            extensions=frozenset(model.extensions),
            sampling=model.sampling,
            pooling=model.pooling if model.HasField("pooling") else None,
        )


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None: no limit. Each is a sum over the jobs that are under way."""

    requests: int | None = None
    """Jobs: prompts, where a call has several."""
    tokens: int | None = None
    """Prompt tokens, and `max_tokens` of every choice."""
    sequences: int | None = None
    """Choices."""


NO_QUOTA: Final = Quota()


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request, ready to run. Compared and hashed by identity: see `id`."""

    id: str
    """The trace id, 32 hex digits. Two requests of one trace share it, so it is no key."""
    model: ServedModel
    prompt_ids: NDArray[np.uint32]
    """Shape (prompt_tokens,), at least one, all below the vocabulary's size."""
    sampling: worker_pb2.Sampling
    """Every default filled in, the seed drawn. Read only."""
    stopping: worker_pb2.Stopping
    """`max_tokens` fits the context. Read only."""
    choices: int
    arrived_ns: int
    """Unix nanoseconds, as every time here."""
    deadline_ns: int
    """The front door cancels the job then. Workers and admission need it, too."""
    context: Context
    """Holds the request's span: the parent of the dispatcher's spans."""
    began_s: float = 0.0
    """When it arrived, by `time.monotonic`; 0: as it is run."""
    priority: int = 0
    prompt_logprobs: bool = False
    tenant: str = ""
    """Who calls; "" where nobody is asked for a token."""
    holder: str = ""
    """Who holds the slots that it takes: the tenant where there are several, else the call."""
    line: str = ""
    """In whose line it waits: the tenant's, else that of its caller's address."""
    turn: str = ""
    """Who takes turns in the line: the call, or the connection of a caller without a tenant."""
    quota: Quota = NO_QUOTA
    """The tenant's."""
    cache_salt: bytes = b""
    keys: ShortKeys = field(default_factory=lambda: NO_KEYS)
    """Keys of the prompt's pages that a worker may find; none where it may find none."""
    extensions: Mapping[str, bytes] = field(default_factory=dict)
    """Bytes for hooks of workers, by their names."""
    speculates: bool = True
    """Whether workers may verify drafts of its output."""
    beams: worker_pb2.BeamSearch | None = None
    """Its output is searched for: each choice is what a beam found, and all come at the end."""
    pooling: worker_pb2.Pooling | None = None
    """What is made of its prompt's hidden states; None: it generates. Then it has one choice, and
    `max_tokens` 0."""
    workers: list[str] = field(default_factory=list)
    """Ids of the workers that got a part of the job, in order. The dispatcher adds them."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of a job, or of a resumed choice group, in numbers."""

    model: ServedModel
    prompt_tokens: int
    max_tokens: int
    """Output tokens of each choice."""
    choices: int
    prompt_logprobs: bool = False
    holder: str = ""
    """See `Job.holder`; "" shares with nobody."""
    keys: ShortKeys = field(default_factory=lambda: NO_KEYS, compare=False, repr=False)
    """See `Job.keys`."""
    extensions: frozenset[str] = frozenset()
    """Hooks that every worker of the route must have."""
    searches: bool = False
    """Whether its choices are beams, which run together or not at all."""
    pools: bool = False
    """Whether it ends with its prompt, which is pooled."""

    @classmethod
    def of(cls, job: Job, choices: int | None = None, done: int = 0) -> Self:
        """The demand of a job, or of so many of its choices. Of each, `done` tokens were generated
        before. They count as prompt, since they are computed again behind it."""
        return cls(
            model=job.model,
            prompt_tokens=job.prompt_tokens + done,
            max_tokens=job.stopping.max_tokens - done,
            choices=job.choices if choices is None else choices,
            prompt_logprobs=job.prompt_logprobs,
            holder=job.holder,
            keys=job.keys,
            extensions=frozenset(job.extensions),
            searches=job.beams is not None,
            pools=job.pooling is not None,
        )

    @property
    def decodes(self) -> bool:
        """Whether a worker decodes. A prefill worker draws the first token, and chooses none."""
        return self.searches or self.max_tokens > 1

    def most_tokens(self, pages: int) -> int:
        """Tokens of a choice, prompt and output, for which an empty pool of `pages` has room."""
        size = self.model.page_size_tokens
        if not self.searches:
            return (pages - 2 * (self.choices - 1)) * size  # Pages in which the choices diverge.
        shared = self.prompt_tokens // size
        return (shared + (pages - shared) // self.choices) * size

    @property
    def whole_tokens(self) -> int:
        """Prompt and output of a choice."""
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log probability of one token and of the likeliest alternatives, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class JobStarted(NamedTuple):
    """The first token is known."""

    cached_prompt_tokens: int = 0
    """As far as is known: the decode worker's first token may overtake the prefill worker's word.
    `JobFinished` has the last one."""
    prompt_logprobs: tuple[TokenScore, ...] = ()
    """Scores of the prompt's tokens from the second on, if the job asks for them."""


class JobPooled(NamedTuple):
    """The prompt of a job that pools was pooled."""

    values: bytes
    """Numbers, packed as little-endian floats of 4 bytes."""


class JobTokens(NamedTuple):
    """New tokens of one choice, continuing exactly where the previous ones ended."""

    choice: int
    first_index: int
    """Index of the first of them in the choice's whole output."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenScore, ...] = ()
    """One per token if `sampling.top_logprobs` is set, else empty."""


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """A choice ended by a rule that workers apply."""

    choice: int
    reason: worker_pb2.EndReason.ValueType
    output_tokens: int
    """Tokens in the choice's whole output."""
    drafted_tokens: int = 0
    """Drafts that the last worker verified for it."""
    accepted_tokens: int = 0
    score: float | None = None
    """Score of what a search found."""


@dataclass(frozen=True, slots=True)
class JobTimings:
    """Time in each phase, nanoseconds; the fields of the public `Timings`."""

    queue_ns: int = 0
    """Time in the router's and in the prefill worker's queue."""
    prefill_ns: int = 0
    kv_transfer_ns: int = 0
    """Time of the transfer after the last chunk was computed."""
    decode_queue_ns: int = 0
    decode_ns: int = 0

    def __add__(self, other: JobTimings) -> JobTimings:
        """The summed phases of two attempts, one after the other."""
        return JobTimings(
            queue_ns=self.queue_ns + other.queue_ns,
            prefill_ns=self.prefill_ns + other.prefill_ns,
            kv_transfer_ns=self.kv_transfer_ns + other.kv_transfer_ns,
            decode_queue_ns=self.decode_queue_ns + other.decode_queue_ns,
            decode_ns=self.decode_ns + other.decode_ns,
        )


@dataclass(frozen=True, slots=True)
class JobFinished:
    """Every choice has ended; the last event."""

    timings: JobTimings = JobTimings()
    cached_prompt_tokens: int = 0
    loaded_prompt_tokens: Mapping[str, int] = field(default_factory=dict)
    """Cached tokens that were loaded from below the pool, by where from."""


JobEvent = JobStarted | JobPooled | JobTokens | ChoiceEnded | JobFinished


class Counts(Protocol):
    """What tenants use now."""

    def counted(self, tenant: str, quota: Quota) -> AbstractContextManager[None]:
        """Counts a call that is no job as one request, as long as the block runs.

        Raises:
            RouterError: QUOTA_EXCEEDED.
        """
        ...

    async def room(self, job: Job) -> None:
        """Waits until the job could be counted, for as long as its tenant's others leave no room.
        One that is too much by itself does not wait."""
        ...


class Dispatcher(Protocol):
    """Runs jobs on workers. Every method belongs to the event loop's thread."""

    @property
    def quotas(self) -> Counts:
        """What tenants use."""
        ...

    def models(self) -> Sequence[ServedModel]:
        """Models served now, by name."""
        ...

    def model(self, name: str) -> ServedModel:
        """The model of that name. If only one is served, an empty name selects it.

        Raises:
            RouterError: MODEL_NOT_FOUND. NO_WORKERS if no model is served at all, or if this one
                was served a while ago.
        """
        ...

    def largest_pool_tokens(self, job: Job) -> int | None:
        """Tokens of a choice, prompt and output, that the largest route could ever hold. None if no
        worker could run the job now. Choices of one job share a pool."""
        ...

    async def run(self, job: Job, send: Callable[[JobEvent], None]) -> None:
        """Queues and runs a job. Returns after its last event. Cancelling ends the work at any
        point.

        Args:
            job: the job.
            send: called with each event, directly in the handler of the worker's message, so that
                a token wakes no task on its way to the front door. It must not wait, and may call
                only `end_choice`. An exception from it ends this job alone, and is raised here.

        Raises:
            RouterError: the job could not be finished.
        """
        ...

    def end_choice(self, job: Job, choice: int) -> None:
        """Ends a choice whose stop text was found. It ends soon, not at once.

        Its tokens and its `ChoiceEnded` may still come and are ignored. `JobFinished` does not wait
        for it any more. Does nothing if the choice is unknown, ended or already closed.
        """
        ...
