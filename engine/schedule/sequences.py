"""Requests and their sequences inside the engine, between the columns of the slot table."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.adapters.slots import NO_SLOT
from engine.adapters.types import Adapter
from engine.beams.chooser import Candidates, Chooser
from engine.groups.others import AllKept, Spares
from engine.hooks.requests import HookedRequest
from engine.masks.matchers import GrammarError, TokenMatcher
from engine.pooling.requests import Pooled
from engine.tiers.protocol import Wait
from engine.types import FailureReason, PageIds, Request, Sink, TokenIds, TokenRecord

NO_IDS: PageIds = np.zeros(0, np.int32)


class RequestState(enum.Enum):
    """The state of a request."""

    WAITING = "waiting"
    RESERVED = "reserved"
    """RECEIVE: it waits for its KV."""
    LOADING = "loading"
    """Pages of its prompt come from a lower tier or a peer. Then it is WAITING again."""
    ACTIVE = "active"
    HELD = "held"
    """Nothing runs, but its pages wait for `release`."""


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """A request in the engine, with the scheduler's data about it."""

    request: Request
    sink: Sink
    seniority: int
    """Order of arrival."""
    state: RequestState = RequestState.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    """Its live sequences, set on admission."""
    keys: list[bytes] = field(default_factory=list)
    """Prefix-cache keys of the prompt's complete pages."""
    cached_tokens: int = 0
    """Tokens of its prompt that the prefix cache had, or that were on their way there, when it was
    last asked."""
    spare_pages: PageIds = field(default_factory=lambda: NO_IDS)
    """Pages for copies of the partial page at which the choices diverge."""
    other_spares: Spares = ()
    """Such pages of the other groups."""
    held_pages: PageIds = field(default_factory=lambda: NO_IDS)
    """State HELD: pages that must not be reused yet."""
    other_held: AllKept = ()
    """Such pages of the other groups."""
    reserved_from: int = 0
    """State RESERVED: pages of its prompt that were there already."""
    wait: Wait | None = None
    """What it waited or waits for in state LOADING; None: the tiers were not asked yet."""
    started: bool = False
    """Whether its first chunk was launched."""
    joined: bool = False
    """Whether its sequences have been in the batch."""
    passed_over: int = 0
    """Number of smaller requests that were admitted before it."""
    slot_passed_over: int = 0
    """Number of requests with an adapter that were admitted before it while it lacked a slot for
    its own."""
    hooked: HookedRequest = field(init=False)
    tokens: TokenIds = field(init=False)
    """The tokens of its first choice that were known when it came: the prompt, and what another
    worker has generated."""
    chooser: Chooser | None = None
    """Chooses how its sequences go on, once there are candidates; None: each draws by itself."""
    restarts: int = 0
    """How often a search began again."""
    scores: NDArray[np.float32] | None = None
    """Scores of its sequences that the device gets with the next step; None: it has them."""
    heard: dict[int, Candidates] = field(default_factory=dict)
    """What its chooser is to choose from next, by slot."""
    held_adapter: Future[Adapter] | None = None
    """The content of its adapter, which it holds as soon as that is there."""
    adapter_slot: int = NO_SLOT
    """Where the device has that, from its admission on."""
    slot_wanted_s: float = 0.0
    """Since when it waits for a slot of its adapter; 0: it does not."""
    matchers: Future[list[TokenMatcher]] | None = None
    """For each choice the tokens that it may draw; None: all of them may draw any."""

    def __post_init__(self) -> None:
        self.hooked = HookedRequest(self.request)
        self.tokens = self.tokens_of(0)

    def tokens_of(self, choice: int) -> TokenIds:
        """The tokens of a choice that were known when the request came. Choices without any of
        their own share the prompt's array."""
        prompt, generated = self.request.prompt_ids, self.request.generated
        return np.concatenate([prompt, generated[choice]]) if generated else prompt

    @property
    def adapter(self) -> Adapter | None:
        """The content of its adapter, once the request is prepared."""
        return None if self.held_adapter is None else self.held_adapter.result()

    @property
    def is_prepared(self) -> bool:
        """Whether it need not wait for its matchers or its adapter. Where it cannot have them it
        waits until it is told so, and fails."""
        awaited = (each for each in (self.matchers, self.held_adapter) if each is not None)
        return all(each.done() and each.exception() is None for each in awaited)

    @property
    def lacks(self) -> FailureReason | None:
        """Why it cannot run, of what it waited for; None: nothing has failed."""
        for awaited, reason in (
            (self.matchers, FailureReason.STRUCTURE),
            (self.held_adapter, FailureReason.ADAPTER),
        ):
            if awaited is not None and awaited.done() and (error := awaited.exception()):
                return error.reason if isinstance(error, GrammarError) else reason
        return None

    def goes_with(self, sequence: Sequence) -> bool:
        """Whether its sequences run only together with this one."""
        return self.request.beams is not None and sequence.active is self

    def matcher_of(self, choice: int) -> TokenMatcher | None:
        """The matcher of a choice, once the request is prepared."""
        return None if self.matchers is None else self.matchers.result()[choice]


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request."""

    active: ActiveRequest
    choice: int
    tokens: TokenIds
    """Prompt and output, which a prefill of this sequence computes. What it draws in a slot is
    added when it leaves that slot."""
    matcher: TokenMatcher | None = None
    """Knows the tokens that it may draw; None: all."""
    slot: int = -1
    """-1 while preempted."""
    drafts: list[int] = field(default_factory=list)
    """If it is masked: the drafts that its next step verifies, as far as the host knows them."""
    preemptions: int = 0
    drafted: int = 0
    """Drafts verified for it in slots that it has left."""
    accepted: int = 0
    wait: Wait | None = None
    """As for a request, since it was preempted last."""

    @property
    def noise_choice(self) -> int:
        """The choice that keys the noise."""
        return self.active.request.first_choice + self.choice

    @property
    def outputs(self) -> TokenIds:
        """The generated tokens among `tokens`."""
        return self.tokens[len(self.active.request.prompt_ids) :]

    def append(self, outputs: TokenIds) -> None:
        """Adds generated tokens."""
        if outputs.size:
            self.tokens = np.concatenate([self.tokens, outputs])


@dataclass(eq=False, slots=True)
class PrefillTask:
    """Tokens to compute in chunks. [0, cursor) are launched, [cursor, end) are left."""

    leader: Sequence
    """The sequence whose slot holds the pages."""
    followers: list[Sequence]
    """Sequences that fork off the leader when the last chunk is launched."""
    tokens: TokenIds
    """The leader's prompt and its earlier outputs."""
    keys: list[bytes]
    """Prefix-cache keys of the complete pages."""
    cursor: int
    cached_tokens: int
    """Tokens found in the prefix cache. It is the cursor's first value."""
    loaded_tokens: Mapping[str, int]
    """Cached tokens that came from lower tiers, by tier."""
    published_pages: int
    """Leading pages that are keyed, or need no key."""
    slot: int = 0
    generation: int = 0
    """The generation of the leader's slot at the start. The task is dead if the leader is in
    another slot, or if the slot's generation differs. A sequence that is computed again may be in
    another slot of the same generation."""
    scores: list[TokenRecord] = field(default_factory=list)
    """Log probabilities of the prompt so far, if they are wanted."""
    states: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    """[H]. The sum of its hidden states so far, if they are pooled."""

    def pooled(self, at_ns: int) -> Pooled:
        """What its hidden states make, once all of them are there."""
        request = self.leader.active.request
        assert request.pooling is not None, "it pools"
        return Pooled(request.id, request.pooling.finish(self.states, self.num_tokens), at_ns)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in all."""
        return len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens not launched yet."""
        return len(self.tokens) - self.cursor

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences, leader first."""
        return [self.leader, *self.followers]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One prefill row: tokens [start, end) of a task."""

    task: PrefillTask
    start: int
    end: int
    first_sample: int
    """Index of this row's first sample among the step's. It has a meaning only on the last
    chunk."""
    score: int
    """Index among the step's scores; -1 for none."""
    pool: int = -1
    """Index among the step's pools; -1 for none."""

    @property
    def is_last(self) -> bool:
        """Whether this chunk completes the prompt."""
        return self.end == self.task.num_tokens
