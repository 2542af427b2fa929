"""What goes into the engine and what comes out of it.

A *request* is one prompt and `choices` sequences grown from it; each running sequence holds one
*slot*. Requests enter through `Engine.submit`; everything that happens to one is told to the sink
it was submitted with, as a list of events once a step, on the step loop's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
PageIds = NDArray[np.int32]


class Mode(enum.Enum):
    """What the engine is to do with a request."""

    WHOLE = "whole"
    """Prefill and decode here."""
    PREFILL = "prefill"
    """Prefill, sample the first tokens, then hold the prompt's pages until `Engine.release`."""
    RECEIVE = "receive"
    """Reserve slots and pages; decode after `Engine.deliver` says that the pages are filled. Where
    `Request.takeover_tokens` allows it, take the prompt over instead."""


class EndReason(enum.Enum):
    """Why a sequence ended by itself."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"


class FailureReason(enum.Enum):
    """Why the engine gave a request up."""

    INTERNAL = "internal"
    TOO_LARGE = "too_large"
    NUMERICAL = "numerical"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The defaults sample from the model's distribution as it is."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 disables it."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """Keys the noise, with the choice and the output index; in [0, 2**64)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    """None: no log probabilities; n: of the token and of the n best."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a sequence ends. Stop texts are the router's business."""

    max_tokens: int
    min_tokens: int = 0
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt to run."""

    id: bytes
    prompt_ids: TokenIds
    sampling: SamplingParams
    stop: StopRules
    mode: Mode = Mode.WHOLE
    choices: int = 1
    first_choice: int = 0
    """Added to a choice's index where that keys the noise: a resumed choice comes by itself."""
    generated: tuple[TokenIds, ...] = ()
    """Tokens already sent, one array per choice: forced, never sampled again. Empty: none."""
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    prompt_logprobs: bool = False
    takeover_tokens: int = 0
    """RECEIVE: where the prefix cache holds the larger part of the prompt and at most so many
    tokens are left, they are computed here, and no delivery is waited for."""


class TokenRecord(NamedTuple):
    """One token and what was asked for about it."""

    token_id: int
    logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """RECEIVE: slots and pages are held. `pages` covers the prompt, in order."""

    request_id: bytes
    pages: PageIds
    held_pages: int
    """Leading pages that hold the prompt's KV already (prefix cache): not to be written."""


@dataclass(frozen=True, slots=True)
class TakenOver:
    """RECEIVE: the prompt is computed here from now on, as for WHOLE."""

    request_id: bytes
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The first chunk of the prompt was launched."""

    request_id: bytes
    cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    at_ns: int


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """PREFILL: KV of the prompt's tokens [0, end_token) is in `pages` and will not change."""

    request_id: bytes
    end_token: int
    pages: PageIds
    """All pages of the prompt."""
    at_ns: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    """PREFILL: the first token of every choice. Nothing follows: the pages wait for release."""

    request_id: bytes
    records: tuple[TokenRecord, ...]
    ends: tuple[EndReason | None, ...]
    """Per choice, why it ended with this token, if it did."""
    at_ns: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The request's sequences joined the running batch (RECEIVE and WHOLE)."""

    request_id: bytes
    at_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """What one step drew for the running sequences of one sink: columns of R rows, a token each.
    A request's choices that begin together are neighbours, in order."""

    request_ids: Sequence[bytes]
    """[R]"""
    choices: NDArray[np.int32]
    """[R]"""
    indices: NDArray[np.int32]
    """[R]; of the token in the sequence's whole output."""
    token_ids: TokenIds
    """[R]"""
    scored: Mapping[int, TokenRecord]
    """By row, the tokens whose log probabilities are wanted."""
    at_ns: int

    def record(self, row: int) -> TokenRecord:
        """The token of a row, with what was asked for about it."""
        return self.scored.get(row) or TokenRecord(int(self.token_ids[row]))


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of the prompt's tokens from the second on, where asked for."""

    request_id: bytes
    records: tuple[TokenRecord, ...]


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """A sequence ended by itself; after the last choice's the engine holds nothing of it."""

    request_id: bytes
    choice: int
    reason: EndReason
    output_tokens: int
    last: bool
    """Whether this was the request's last running choice."""
    preemptions: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The engine gave the request up and holds nothing of it, but for the pages of a PREFILL that
    has begun: somebody may be reading them, and they wait for release."""

    request_id: bytes
    reason: FailureReason


EventOfOne = (
    Reserved
    | TakenOver
    | PrefillStarted
    | ChunkComputed
    | Prefilled
    | Joined
    | PromptScored
    | SequenceEnded
    | RequestFailed
)
"""What happens to one request."""
Event = EventOfOne | NewTokens
Sink = Callable[[Sequence[Event]], None]
"""Called on the step loop's thread once a step with the events of the requests submitted with
this sink, in order. Must not block and must not raise."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot of the engine, replaced by the step loop every turn; read from any thread."""

    progress: int = 0
    """Turns of the step loop, idle ones included (at least one in 0.5 s)."""
    queued_prefill_tokens: int = 0
    """Of prompts to be computed here, those of steps in flight included."""
    requests: frozenset[bytes] = frozenset()
    """Those that the engine holds, and that the other figures contain."""
    waiting_requests: int = 0
    wanted_pages: int = 0
    """That requests wait for which have none yet."""
    wanted_sequences: int = 0
    """Slots that such requests wait for."""
    running_sequences: int = 0
    max_sequences: int = 0
    total_pages: int = 0
    free_pages: int = 0
    evictable_pages: int = 0
    granted_pages: int = 0
    quarantined_pages: int = 0
    damaged_pages: int = 0
    """Found written while they were free, where that is watched for: must stay 0."""
    step_ms: float = 0.0
    """Duration of the last step, launch to settled."""
    long_step_ms: float = 0.0
    """Expected duration of the step in flight, where progress may pause for so long; else 0."""
    prefill_tokens_per_s: float = 0.0
    """Moving average of the rate at which steps compute prompt tokens; 0 while unknown."""
    prefill_rate_age_s: float = 0.0
    """Since a step last added to that rate."""
    steps: int = 0
    preemptions: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_sampled: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model, as others must know it."""

    name: str
    path: str
    revision: str
    """Digest of the config and of sampled weight rows (or of the dummy seed)."""
    fingerprint: str
    """Digest of revision, dtypes, page size, layer and head counts, rope and layout version."""
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    page_size_tokens: int
