"""Requests and their sequences inside the engine, between the columns of the slot table."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from engine.types import PageIds, Request, Sink, TokenIds, TokenRecord


class RequestState(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RESERVED = "reserved"
    """RECEIVE: waiting for its KV."""
    ACTIVE = "active"
    HELD = "held"
    """Nothing runs, but its pages wait for `release`."""


@dataclass(eq=False, slots=True)
class ActiveRequest:
    """A request and what the scheduler knows of it."""

    request: Request
    sink: Sink
    seniority: int
    """Order of arrival."""
    state: RequestState = RequestState.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    """Live ones, set on admission."""
    keys: list[bytes] = field(default_factory=list)
    """Prefix-cache keys of the prompt's complete pages."""
    spare_pages: PageIds = field(default_factory=lambda: np.zeros(0, np.int32))
    """For copies of a partial page that the choices will share."""
    held_pages: PageIds = field(default_factory=lambda: np.zeros(0, np.int32))
    """State HELD: pages that must not be reused yet."""
    started: bool = False
    """Its first chunk was launched."""
    joined: bool = False
    """Its sequences were in the batch."""
    passed_over: int = 0
    """How often a smaller request was admitted before it."""

    @property
    def initial_outputs(self) -> tuple[TokenIds, ...]:
        """Per choice, tokens generated before this engine saw the request."""
        nothing = np.zeros(0, np.int32)
        return self.request.generated or (nothing,) * self.request.choices


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request."""

    active: ActiveRequest
    choice: int
    outputs: TokenIds
    """Tokens generated, while the sequence is out of a slot."""
    slot: int = -1
    """-1 while preempted."""
    preemptions: int = 0

    @property
    def noise_choice(self) -> int:
        """Which choice the noise is keyed by."""
        return self.active.request.first_choice + self.choice

    def tokens(self) -> TokenIds:
        """Prompt and output: what a prefill of this sequence computes."""
        return np.concatenate([self.active.request.prompt_ids, self.outputs])


@dataclass(eq=False, slots=True)
class PrefillTask:
    """Tokens to compute in chunks. [0, cursor) launched; [cursor, end) to come."""

    leader: Sequence
    """Its slot holds the pages."""
    followers: list[Sequence]
    """Sequences that fork off it when the last chunk is launched."""
    num_tokens: int
    """Of the leader's prompt and of the outputs that it had before."""
    keys: list[bytes]
    """Prefix-cache keys of the complete pages."""
    cursor: int
    cached_tokens: int
    """Found in the prefix cache: the cursor's first value."""
    published_pages: int
    """Leading pages that are keyed, or need no key."""
    slot: int = 0
    generation: int = 0
    """The leader's slot, and that one's: another of either means that the task is dead. A sequence
    that is computed again may be in another slot, of the same generation."""
    scores: list[TokenRecord] = field(default_factory=list)
    """Log probabilities of the prompt so far, where wanted."""

    @property
    def remaining(self) -> int:
        """Tokens not launched yet."""
        return self.num_tokens - self.cursor

    @property
    def sequences(self) -> list[Sequence]:
        """Leader first."""
        return [self.leader, *self.followers]
