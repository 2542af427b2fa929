"""What a hook is, and what it gets.

A hook is an object of an installed package, named by `--hook`. It lives as long as its worker:

1. Made from its options, before the model is loaded, on every rank.
2. `attach`: the pool is there.
3. Per request: `request_began`, which says by a *tag* whether the hook has to do with it, and
   `request_ended`. On rank 0, on the step loop's thread.
4. Per step, on the device's thread of every rank: `rows_narrowed`, by which rank 0 decides for all
   where they have GPUs; `step_began`; `choosing_began`; in each layer `attention_began`,
   `pages_wanted` and `attention_ended`; `step_ended`. All but `step_began` and `step_ended` are for
   hooks of `baton.attention` alone.

A hook reads what it is given and must not write to it. A hook that raises, or takes too long, has
failed: for that step it is not called again, and its requests fail or go on without it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.pool.kv_pool import KvPool
from engine.step.attention import Specs
from engine.types import PageIds, Request

Int32s = NDArray[np.int32]


class HookError(Exception):
    """A hook cannot be used as configured. The message names it and says what to change."""


class ExtensionError(Exception):
    """The bytes that a request carries for a hook mean nothing to it. The request is refused."""


class OnFailure(enum.Enum):
    """What becomes of a hook's requests if it fails in a step of theirs."""

    FAIL = "fail"
    """They fail."""
    LEAVE = "leave"
    """They go on, and the hook leaves them alone from then on."""


class HookTag(NamedTuple):
    """A tag that a hook attaches to a request, and gets back with each of its rows."""

    value: int
    """A number of at least 1 with a meaning for the hook alone. It comes with each of the request's
    rows in each step, on every rank."""
    exact_tokens: int | None = None
    """KV that is decoded here from this index on may differ from the model's own. Its pages are
    never cached. None: it is all the model's own; of a hook that chooses pages, the prompt's is."""


class HookSite(NamedTuple):
    """Where a hook is attached: one rank."""

    pool: KvPool
    """This rank's part of the pages."""
    specs: Specs
    """Attention of each layer."""
    decodes: bool
    """Whether this engine decodes. If not, it computes prompts alone."""

    def may_choose(self, layer: int) -> bool:
        """Whether a hook may choose the pages that rows read in a layer: it has no window, and no
        sinks, which belong to single heads."""
        spec = self.specs[layer]
        return spec.window is None and spec.sinks is None


class HookFailure(NamedTuple):
    """A hook failed in a step."""

    hook: int
    """Its index, in the order in which hooks were named."""
    name: str
    point: str
    """The method that raised, or in which it was found to be too slow."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, as one hook sees them: R rows, decode rows first. All on the host."""

    number: int
    """Number of the step."""
    tags: Int32s
    """[R], the hook's own (`HookTag.value`); 0: it leaves the row alone."""
    query_lens: Int32s
    """[R] new tokens; 1 in decode rows."""
    context_lens: Int32s
    """[R] tokens in KV after this step."""
    num_decodes: int
    prompts_at: int
    """Where the tokens of the rows that are no decode rows begin, among those of a layer. A step
    that fits a graph is padded: tokens from `num_decodes` up to here are of no row, nor are those
    behind the last row's."""
    page_table: Int32s
    """[R, P]; the scratch page beyond a row's context. On a GPU the rows of beams have the pages of
    the step before: which beam goes on from which is chosen there, and the host hears of it later.
    The page into which a row stores is right."""
    page_size: int
    arrived: PageIds
    """Pages whose KV came from another worker or a lower tier since the last step."""

    @property
    def written(self) -> PageIds:
        """Pages into which this step stores tokens."""
        return self._pages(-(-self.context_lens // self.page_size))

    @property
    def completed(self) -> PageIds:
        """Pages that are full after it."""
        return self._pages(self.context_lens // self.page_size)

    def _pages(self, ends: Int32s) -> PageIds:
        """Pages of each row from the one of its first new token to `ends`."""
        firsts = (self.context_lens - self.query_lens) // self.page_size
        counts = np.maximum(ends - firsts, 0)
        rows = np.repeat(np.arange(len(counts)), counts)
        before = counts.cumsum() - counts
        columns = np.arange(len(rows)) - before[rows] + firsts[rows]
        pages: PageIds = self.page_table[rows, columns]
        return pages


class Narrowed(NamedTuple):
    """Decode rows with a tag that read some of their pages only, in ascending order."""

    rows: NDArray[np.intp]
    """[B]"""
    counts: Int32s
    """[B] pages that each KV head of the row reads, at least 1 and at most those that it has."""


class DecodeRows(NamedTuple):
    """B decode rows on the device, of which some are narrowed. In a graph the tensors have the same
    addresses in every step, and other contents."""

    table: Tensor
    """[B, P] int32 or int64, with any stride between rows: their pages. What lies beyond a row's
    context means nothing."""
    contexts: Tensor
    """[B] int32 or int64: tokens in KV after the step."""
    counts: Tensor
    """[B] int32 or int64: pages that each KV head of the row reads; 0: the row is not narrowed."""
    most: int
    """At least the greatest count. In a graph it is `AttentionHook.graph_pages`, or P if that is
    less."""
    page_size: int


class Hook:
    """A hook of `baton.hooks`. Subclasses override what they need."""

    name: str
    """The name by which it is installed."""
    capturable: bool = False
    """Whether a graph of the device may contain the calls in layers: they launch kernels of fixed
    shapes at fixed addresses and never wait for them. They are made before the first step, when
    graphs are captured; without graphs once, in each layer, with a made-up row. In a step of a
    graph the kernels run without them, and `step_began` puts what they need at those addresses.

    If not: a step with its requests runs its kernels one by one, and the layers of other steps do
    not call it. A hook that chooses pages says in `graph_pages` up to which size."""
    needs_both: bool = False
    """Whether it must be on both ends of a hand-off, with equal options."""
    on_failure: OnFailure = OnFailure.FAIL

    def page_bytes(self, pool: KvPool) -> int:
        """Memory that it takes beside each page of such a pool, bytes."""
        return 0

    def attach(self, site: HookSite) -> None:
        """The pool is there. Raises HookError if the hook cannot work here."""
        return

    def request_began(self, request: Request, extension: bytes | None) -> HookTag | None:
        """A request has come. None: the hook leaves it alone.

        Args:
            request: the request; its `mode` says which leg this is.
            extension: bytes that the client has sent for this hook; None: it sent none.

        Raises:
            ExtensionError: the bytes mean nothing.
        """
        return None

    def request_ended(self, request_id: bytes) -> None:
        """The engine holds nothing of a request any more, for whatever reason, and no step to come
        has a row of it. Called for requests for which `request_began` returned a tag."""
        return

    def step_began(self, step: StepRows) -> None:
        """A step begins, also one without a row of this hook's."""
        return

    def step_ended(self, step: StepRows) -> None:
        """The forward pass is done."""
        return


class AttentionHook(Hook):
    """A hook of `baton.attention`, which is called in each layer, too.

    Shapes: T tokens of the step, Hq query heads and Hkv KV heads of this rank, D head dimension.
    """

    chooses_pages: bool = False
    """Whether it narrows rows. Only one hook of a worker may."""
    graph_pages: int = 0
    """Most pages of a capturable hook that chooses some: the most that a KV head of a row reads in
    a graph. A step with a row that reads more runs its kernels one by one. `attach` may set it."""

    def rows_narrowed(self, step: StepRows) -> Narrowed | None:
        """Decode rows for which it will choose pages in this step. Called before `step_began`, with
        a step that is not padded. It computes on the host alone."""
        return None

    def choosing_began(self, rows: DecodeRows) -> None:
        """The forward pass of a step with narrowed rows begins: `step_began` has returned. Called
        while a graph is captured, and not when it is replayed."""
        return

    def attention_began(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """A layer's attention begins: `q` [T, Hq, D], `k` and `v` [T, Hkv, D], with positions."""
        return

    def pages_wanted(self, layer: int, q: Tensor) -> Tensor | None:
        """The pages that narrowed rows read in this layer. None: all of theirs.

        Not asked where `HookSite.may_choose` says no. In a graph the answer is None, or not, in
        every step.

        Args:
            layer: the layer.
            q: [B, Hq, D] of the rows of `choosing_began`, with any stride between rows.

        Returns:
            [B, Hkv, C] int64, where C is `DecodeRows.most`: places in the row's page table. Of a
            row's columns as many as its count are read. The last of these is always the row's last
            page. A place that the row does not have is read as its nearest, and the hook has failed
            at the end of the step. Rows that are not narrowed read all pages, whatever is said.
        """
        return None

    def attention_ended(self, layer: int, q: Tensor, out: Tensor) -> None:
        """A layer's attention is done: `q` and `out` [T, Hq, D]. K and V are in the pool."""
        return
