"""Requests, which go into the engine, and events, which come out of it.

A *request* is one prompt and `choices` sequences that continue it. Each running sequence holds one
*slot*. Requests enter through `Engine.submit`. The events of a request go to the sink that it was
submitted with, as a list once a step, on the step loop's thread.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.beams.params import BeamParams
from engine.checkpoints import SamplingDefaults
from engine.group_pages import GroupGrant, GroupPages
from engine.loads import EngineLoad as EngineLoad
from engine.pooling.checkpoint import PoolingDefaults
from engine.pooling.requests import Pooled, Pooling

TokenIds = NDArray[np.int32]
PageIds = NDArray[np.int32]
SCRATCH_PAGE = 0
"""Padding is written to this page. Nobody holds it."""


class Mode(enum.Enum):
    """The work that a request wants of the engine."""

    WHOLE = "whole"
    """Prefill and decode here."""
    PREFILL = "prefill"
    """Prefill, sample the first tokens, then hold the prompt's pages until `Engine.release`."""
    RECEIVE = "receive"
    """Reserve slots and pages, and decode after `Engine.deliver` says that the pages are filled. If
    `Request.takeover_tokens` allows it, take the prompt over instead."""
    POOL = "pool"
    """Prefill, and pool the prompt's hidden states (`Request.pooling`). No token is drawn."""

    @property
    def decodes(self) -> bool:
        """Whether tokens are generated here behind the first one."""
        return self in (Mode.WHOLE, Mode.RECEIVE)


class EndReason(enum.Enum):
    """The reason for which a sequence ended by itself."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"


class FailureReason(enum.Enum):
    """The reason for which the engine gave a request up."""

    INTERNAL = "internal"
    TOO_LARGE = "too_large"
    NUMERICAL = "numerical"
    STRUCTURE = "structure"
    """The grammar of its output needs more fuel than it has, or cannot be compiled."""
    NO_TOKEN = "no_token"
    """What narrows its tokens, together, leaves none to draw."""
    HOOK = "hook"
    """A hook that it needs has failed."""
    BEAMS = "beams"
    """It searches with beams, and the model has several stages."""
    ADAPTER = "adapter"
    """Its adapter is not here."""
    EXTENSION = "extension"
    """It carries bytes for a hook that is not here, or to which they mean nothing."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A bound on the tokens that a model thinks."""

    tokens: int
    """Most output tokens before the end of the thinking is forced."""
    begin_ids: tuple[int, ...]
    """The output begins with these if the model thinks; empty if the prompt has begun it."""
    end_ids: tuple[int, ...]
    """These end the thinking."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters for drawing tokens. The defaults sample from the model's own distribution."""

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
    """None: no log probabilities; n: those of the token and of the n best."""
    grammar: str = ""
    """The form of the output, in llguidance's own form (JSON); empty: any."""
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens to draw; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that are never completed."""
    thinking: ThinkingBudget | None = None

    @property
    def is_restricted(self) -> bool:
        """Whether not every token may be drawn."""
        return bool(
            self.grammar or self.allowed_token_ids or self.bad_words or self.thinking is not None
        )


@dataclass(frozen=True, slots=True)
class StopRules:
    """Rules that end a sequence. The router handles stop texts."""

    max_tokens: int
    min_tokens: int = 0
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


class PeerFetch(NamedTuple):
    """Leading pages of a prompt that another worker is said to hold."""

    peer: str
    """Agent name of that worker."""
    pages: int


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
    """Added to a choice's index for the noise: a resumed choice comes in its own request."""
    generated: tuple[TokenIds, ...] = ()
    """Tokens already sent, one array per choice: forced, never sampled again. Empty if none."""
    priority: int = 0
    tenant: str = ""
    cache_salt: bytes = b""
    adapter: bytes = b""
    """Digest of the adapter that computes it; empty: the model alone does."""
    prompt_logprobs: bool = False
    extensions: Mapping[str, bytes] = field(default_factory=dict)
    """Bytes for hooks, by their names."""
    takeover_tokens: int = 0
    """RECEIVE: most tokens that may be left for a take-over. If the prefix cache holds the larger
    part of the prompt, the rest is computed here, without a delivery."""
    fetch: PeerFetch | None = None
    """WHOLE and PREFILL: where pages can be had that are missing here; None: they are computed."""
    speculates: bool = True
    """Whether drafts of its output may be verified, where the engine does that."""
    pooling: Pooling | None = None
    """POOL: how."""
    beams: BeamParams | None = None
    """Its output is searched for: it has a choice for each beam, one in PREFILL."""

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether every token of the prompt must be computed, cached or not."""
        return self.prompt_logprobs or (self.pooling is not None and self.pooling.reads_all)

    @property
    def first_tokens(self) -> int:
        """Tokens drawn behind the prompt. Beams begin with the candidates of one."""
        return self.choices if self.beams is None else 1


class TokenRecord(NamedTuple):
    """One token, with its log probabilities if they are wanted."""

    token_id: int
    logprob: float | None = None
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Reserved:
    """RECEIVE: slots and pages are reserved. `pages` covers the prompt, in order."""

    request_id: bytes
    pages: PageIds
    held_pages: int
    """Leading pages that hold the prompt's KV already (prefix cache). They must not be written."""
    others: tuple[GroupGrant, ...] = ()
    """The pages of the other groups, for the end of the prompt that they keep."""


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
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Cached tokens that were loaded from lower tiers for this request, by tier."""


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """PREFILL: KV of the prompt's tokens [0, end_token) is in `pages` and will not change."""

    request_id: bytes
    end_token: int
    pages: PageIds
    """All pages of the prompt."""
    at_ns: int
    others: tuple[GroupPages, ...] = ()
    """Pages of the other groups: of the end of the prompt that they keep, at the least."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """PREFILL: the first token of every choice. Nothing follows: the pages wait for release."""

    request_id: bytes
    records: tuple[TokenRecord, ...]
    ends: tuple[EndReason | None, ...]
    """For each choice the reason for its end, if it ended with this token."""
    at_ns: int
    drafted_from: int = 0
    """The first page from which on a draft head has kept something of all tokens."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The request's sequences joined the running batch (RECEIVE and WHOLE)."""

    request_id: bytes
    at_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """The tokens of one step for the running sequences of one sink: columns of R rows, a token
    each. Choices of a request that begin together are neighbours, in order."""

    request_ids: Sequence[bytes]
    """[R]"""
    choices: NDArray[np.int32]
    """[R]"""
    indices: NDArray[np.int32]
    """[R]; index of the token in the sequence's whole output."""
    token_ids: TokenIds
    """[R]"""
    scored: Mapping[int, TokenRecord]
    """Records of the tokens whose log probabilities are wanted, by row."""
    at_ns: int
    step_ns: tuple[int, int] = (0, 0)
    """When their step was launched, and when the device began it; 0 if that is not known."""

    def record(self, row: int) -> TokenRecord:
        """The token of a row, with its log probabilities if they are wanted."""
        return self.scored.get(row) or TokenRecord(int(self.token_ids[row]))


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log probabilities of the prompt's tokens from the second on, if they are wanted."""

    request_id: bytes
    records: tuple[TokenRecord, ...]


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """A sequence ended by itself. After the last choice's end the engine holds nothing of the
    request."""

    request_id: bytes
    choice: int
    reason: EndReason
    output_tokens: int
    last: bool
    """Whether this was the request's last running choice."""
    preemptions: int
    at_ns: int
    drafted_tokens: int = 0
    """Drafts that were verified for it."""
    accepted_tokens: int = 0
    """Accepted drafts that are in its output."""
    score: float | None = None
    """Score of what a search found."""


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The engine gave the request up and holds nothing of it. Only the pages of a PREFILL that has
    begun wait for release, since a transfer may read them."""

    request_id: bytes
    reason: FailureReason
    hook: str = ""
    """The hook's name, for HOOK and EXTENSION."""


EventOfOne = (
    Reserved
    | TakenOver
    | PrefillStarted
    | ChunkComputed
    | Prefilled
    | Joined
    | PromptScored
    | Pooled
    | SequenceEnded
    | RequestFailed
)
"""An event of one request."""
Event = EventOfOne | NewTokens
Sink = Callable[[Sequence[Event]], None]
"""Called on the step loop's thread once a step, with the events of its requests in order. It must
not block or raise."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The identity and shape of a loaded model, for other processes."""

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
    num_kv_heads: int = 1
    """KV heads of a whole page, which the ranks of a worker divide."""
    kv_precision: str = ""
    """Precision of the KV, which keys of pages name."""
    prefix_cache: bool = False
    """Whether pages are found again by their keys."""
    resume_pages: tuple[int, ...] = ()
    """For groups 1, 2, ... the pages right before a place that a prompt needs to go on there."""
    extensions: tuple[str, ...] = ()
    """Names of hooks, for which requests may carry bytes."""
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    pooling: PoolingDefaults = field(default_factory=PoolingDefaults)
