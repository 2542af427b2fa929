"""One step: the scheduler's plan and the executor's result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.adapters.slots import Wanted
from engine.beams.plan import SearchPlan
from engine.pooling.requests import PoolKind
from engine.step.hooks import HookFailure
from engine.step.sampling import SamplePlan

Int32s = NDArray[np.int32]

BY_EACH_RANK: Final = -2
"""`StepPlan.shape`: each rank finds it, and all find the same."""
NO_POOLS: Final[Int32s] = np.zeros((0, 4), np.int32)
NO_SHAPE: Final = -1
"""`StepPlan.shape`: the kernels run one by one."""
STATE_COLUMNS: Final = 2 + 2 * 3
"""Most columns of a table of states: a row saves three of a prompt in a step, or one of an
answer."""
SCORE_ROWS = 256
"""Most positions whose logits are held at once when a prompt is scored."""


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """The prompt tokens of this step whose log probabilities are wanted."""

    first_token: int
    """Index among the step's tokens of the first position whose logits are read."""
    next_ids: Int32s
    """The prompt token that follows each position."""
    top_n: int


@dataclass(frozen=True, slots=True, eq=False)
class Begins:
    """E sequences that have got slots, for tables by slot on the device (`engine.speculation`)."""

    slots: Int32s
    """[E]"""
    lens: Int32s
    """[E]. Tokens so far. The sequence decodes when the KV of just these is there."""
    prompt_lens: Int32s
    """[E]"""
    choices: Int32s
    """[E]. What keys the noise."""
    seeds: NDArray[np.int64]
    """[E]. The bits of the seeds."""
    ids: Int32s
    """[sum of lens]. The tokens, one sequence behind the other."""


@dataclass(frozen=True, slots=True)
class GroupTable:
    """The pages of a step's rows in a group beyond group 0."""

    pages: Int32s
    """[R, P]. It begins at the first page that a row reads. Entries beyond a row's context are the
    scratch page. Of states it is [R, 2 + 2 C]: the page that a row reads, the one that it writes,
    and C times the page of a state that it saves, and how many tokens that has. 0 stands for
    none."""
    skipped: Int32s
    """[R]. Pages of each row before its first one here."""
    copy_source: Int32s
    copy_target: Int32s
    """Pages of this group to copy before the forward pass."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of the device in one step: R rows, T new tokens, S draws.

    The device works in this order: page copies, token table writes, the forward pass, sampling,
    and writing the sampled tokens into the token table. Decode rows come first.

    A decode row has `width` W tokens: its last one, and W - 1 drafts that the device has. Where
    drafts are verified, lengths are the device's: the position of a decode row's first token is the
    least that it may be, and its context is a bound (`engine.speculation`).
    """

    number: int
    token_ids: Int32s
    """[T]. The entries of decode rows are ignored, because the token table has their ids."""
    positions: Int32s
    """[T]"""
    row_slots: Int32s
    """[R]"""
    query_lens: Int32s
    """[R]; `width` for the first `num_decodes` rows."""
    context_lens: Int32s
    """[R]; tokens in KV after this step. Of a decode row whose length the host does not know: the
    most. What the row would store at or behind that place is dropped, and not counted."""
    num_decodes: int
    page_table: Int32s
    """[R, P]: pages of group 0. Entries beyond a row's context are the scratch page."""
    sample_tokens: Int32s
    """[S]. Index among the step's tokens of the position whose logits are sampled. Draws of decode
    rows come first, in their order; of W positions it is the first."""
    sample_slots: Int32s
    """[S]"""
    sample_generations: Int32s
    """[S]. Generation of the slot at planning."""
    sample_indices: Int32s
    """[S]. Output index of the (first) drawn token; the least that it may be."""
    sample: SamplePlan | None
    """None if S is 0."""
    copy_source: Int32s
    copy_target: Int32s
    """Pages of group 0 to copy before the forward pass (copy-on-write)."""
    write_slots: Int32s
    write_tokens: Int32s
    """Token table entries that only the host knows (delivered first tokens)."""
    arrived: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    """[A]. Pages whose KV came from another worker or a lower tier since the last step."""
    undrafted: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    """Pages among them without what a draft head keeps."""
    drafted_from: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R]. The page of each row from which on a draft head reads. The one before lacks what it
    keeps."""
    hook_tags: Int32s = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    """[H, R]. What each of H hooks has to do with each row (`engine.step.hooks.HookTag`)."""
    masked: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    """[M]. Rows among the samples that may draw only some tokens. Their masks come after the
    launch, by `Executor.sample`."""
    whole_logits: bool = True
    """Whether sampling reads whole rows of logits. Otherwise each token is the best of its row."""
    shape: int = BY_EACH_RANK
    """The place among all shapes (`engine.cuda.steps.shapes`) of that to which every rank pads the
    step. Set by `Executor.shaped`."""
    scores: tuple[ScorePlan, ...] = ()
    pools: Int32s = field(default_factory=lambda: NO_POOLS)
    """[P, 4]. Prompts whose hidden states are pooled: `PoolKind`, the row, the first token among
    the step's tokens, and the number of tokens whose states are added up."""
    width: int = 1
    """Tokens of each decode row."""
    successors: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R - num_decodes]. The prompt's token behind each other row; -1: the row is the last one, and
    what comes is drawn."""
    begins: Begins | None = None
    returns_drafts: bool = False
    """Whether the host wants to know the next drafts, because it fills masks behind them."""
    others: tuple[GroupTable, ...] = ()
    """The other groups."""
    adapters: Int32s = field(default_factory=lambda: np.zeros(0, np.int32))
    """[R]. Slot of each row's adapter, -1 for none; empty: no row has one."""
    adapters_wanted: Wanted = ()
    """What is in those slots. The device fills a slot that has something else."""
    searches: tuple[SearchPlan, ...] = ()
    """Searches whose beams the step chooses."""

    @property
    def reads_all_states(self) -> bool:
        """Whether hidden states of other tokens than the last ones of rows are read."""
        return bool(self.scores) or any(kind != PoolKind.LAST for kind in self.pools[:, 0])

    @property
    def decode_tokens(self) -> int:
        """Number of decode rows' tokens."""
        return self.num_decodes * self.width

    @property
    def copies(self) -> list[tuple[Int32s, Int32s]]:
        """Pages to copy, and where to, by group."""
        own = [(self.copy_source, self.copy_target)]
        return own + [(other.copy_source, other.copy_target) for other in self.others]

    @property
    def num_tokens(self) -> int:
        """The number T of new tokens."""
        return len(self.token_ids)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.token_ids) - self.decode_tokens

    @property
    def only_decodes(self) -> bool:
        """Whether the step only decodes. Such steps take about equally long."""
        return 0 < self.num_tokens == self.decode_tokens


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Log probabilities of L prompt tokens."""

    token_ids: Int32s
    """[L]"""
    logprobs: NDArray[np.float32]
    """[L]"""
    top_ids: Int32s
    """[L, N], likeliest first."""
    top_logprobs: NDArray[np.float32]
    """[L, N]"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of the device, on the host: of S draws, or S x W in a step of width W > 1."""

    tokens: Int32s
    """[S] or [S, W]"""
    finite: NDArray[np.bool_]
    """[S]. False if the logits of a token that counts held NaN or infinity."""
    logprobs: NDArray[np.float32] | None
    """[S] or [S, W]"""
    top_ids: Int32s | None
    """[S, N] or [S, W, N], likeliest first. N is the most that any row asked for."""
    top_logprobs: NDArray[np.float32] | None
    """[S, N] or [S, W, N]"""
    scores: tuple[ScoreResult, ...] = ()
    """One per ScorePlan."""
    hook_failures: tuple[HookFailure, ...] = ()
    """Hooks that failed in the step."""
    counts: Int32s | None = None
    """[S]. Leading tokens of each draw that count; None: one of each."""
    drafted: Int32s | None = None
    """[S]. Drafts that each draw has verified; None: none."""
    spoilt: NDArray[np.bool_] | None = None
    """[R]. Rows that have found a wrong state, so that nothing of them counts; None: there are no
    states."""
    next_drafts: Int32s | None = None
    """[S, K]. Drafts of the row's next step, if the plan wants them returned."""
    next_ready: Int32s | None = None
    """[S]. How many of them there are."""
    pooled: NDArray[np.float32] | None = None
    """[P, H]. The sums of hidden states, one of each of the plan's `pools`; None: P is 0."""
