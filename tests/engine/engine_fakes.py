"""A device that needs no model: the next token is a hash of all tokens a sequence's KV holds.

It keeps its own paged KV, written only where plans say, so a wrong page table, a page reused too
early, a lost copy or a wrong position changes tokens, as on a real device.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from engine.step.plan import StepPlan, StepResult
from engine.tiers.lanes import Copy

VOCAB = 997
FIRST_STATE = 17
"""What no tokens are folded into."""


def next_token(tokens: list[int]) -> int:
    """What the fake model says after `tokens`."""
    return folded(FIRST_STATE, 0, tokens) % VOCAB


def folded(state: int, start: int, tokens: Sequence[int]) -> int:
    """A state of `start` tokens, with these behind them."""
    for position, token in enumerate(tokens, start):
        state = (state * 31 + token * (position + 1) + 7) % 1_000_003
    return state


def expected_output(prompt: list[int], max_tokens: int, stops: frozenset[int]) -> list[int]:
    """The output of a sequence run alone."""
    tokens = list(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        token = next_token(tokens)
        output.append(token)
        tokens.append(token)
        if token in stops:
            break
    return output


class HashExecutor:
    """Runs plans over a paged KV of token ids. Steps wait until `finish` is called, or run at
    once; results come in order either way."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_slots: int,
        deferred: bool = False,
        windows: Sequence[tuple[int, int]] = (),
        states: int = 0,
    ):
        """`windows`: window and pages of each group beyond group 0. `states`: pages of the last
        group, which has how many tokens a state has folded in, and what they make; 0: none."""
        self.kv = np.full((num_pages, page_size), -1, np.int64)
        self.others = [np.full((pages, page_size), -1, np.int64) for _, pages in windows]
        self.windows = [window for window, _ in windows]
        self.states = np.full((states, 2), -1, np.int64)
        if states:
            self.others.append(self.states)
        self.torn: set[tuple[int, int]] = set()
        """Steps and slots whose window lacked a token. Only rows that nobody waits for may."""
        self.table = np.full(max_slots, -1, np.int64)
        self.page_size = page_size
        self.deferred: list[tuple[StepPlan, Future[StepResult]]] | None = [] if deferred else None
        self.fail_next: Exception | None = None
        """What the next step ends in."""
        self.lost = False
        """The step before failed: the one in flight behind it reads what was never written."""

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        if self.deferred is None:
            self._complete(plan, future)
        else:
            self.deferred.append((plan, future))
        return future

    def finish(self) -> None:
        assert self.deferred is not None
        self._complete(*self.deferred.pop(0))

    def shutdown(self) -> None:
        pass

    def _complete(self, plan: StepPlan, future: Future[StepResult]) -> None:
        if self.fail_next:
            error, self.fail_next = self.fail_next, None
            self.lost = True
            future.set_exception(error)
        else:
            future.set_result(self._run(plan))

    def _run(self, plan: StepPlan) -> StepResult:
        self.kv[plan.copy_target] = self.kv[plan.copy_source]
        self.table[plan.write_slots] = plan.write_tokens
        token_ids = plan.token_ids.astype(np.int64)
        token_ids[: plan.num_decodes] = self.table[plan.row_slots[: plan.num_decodes]]
        rows = np.repeat(np.arange(len(plan.row_slots)), plan.query_lens)
        index, offset = np.divmod(plan.positions, self.page_size)
        pages = plan.page_table[rows, index]
        assert (pages != 0).all(), "a token was stored on the scratch page"
        self.kv[pages, offset] = token_ids
        for group in range(len(self.windows)):
            self._run_group(plan, group, token_ids)
        states, spoilt = self._run_states(plan, token_ids)
        tokens = []
        for at in plan.sample_tokens.tolist():
            row, position = rows[at], int(plan.positions[at])
            context = self.kv[plan.page_table[row]].reshape(-1)[: position + 1]
            assert self.lost or (context >= 0).all(), "KV was never written"
            tokens.append(states[row] % VOCAB if states else next_token(context.tolist()))
        drawn = np.array(tokens, np.int32)
        self.table[plan.sample_slots] = drawn
        self.lost = False
        finite = np.ones(len(drawn), np.bool_)
        return StepResult(drawn, finite, None, None, None, spoilt=spoilt)

    def _run_states(
        self, plan: StepPlan, token_ids: np.ndarray
    ) -> tuple[list[int], np.ndarray | None]:
        """Folds the tokens of each row into its state, if there is such a group. Returns the
        states, and which rows have found a wrong one."""
        if not len(self.states):
            return [], None
        kv, table, first = self.states, plan.others[-1].pages, 0
        found, spoilt = [], np.zeros(len(table), np.bool_)
        for row, count in enumerate(plan.query_lens.tolist()):
            own, first = token_ids[first : first + count].tolist(), first + count
            start = int(plan.context_lens[row]) - count
            stamp, state = kv[table[row, 0]].tolist() if table[row, 0] else (0, FIRST_STATE)
            spoilt[row] = stamp != start
            pages = dict(zip(table[row, 2::2].tolist(), table[row, 3::2].tolist(), strict=True))
            pages[int(table[row, 1])] = start + count
            for page, end in pages.items():
                if page:
                    value = folded(state, start, own[: end - start])
                    kv[page] = (-1, -1) if spoilt[row] else (end, value)
            found.append(folded(state, start, own))
        return found, spoilt

    def _run_group(self, plan: StepPlan, group: int, token_ids: np.ndarray) -> None:
        """Stores the tokens in a window's group, and reads what each new token sees of it."""
        kv, table, window = self.others[group], plan.others[group], self.windows[group]
        kv[table.copy_target] = kv[table.copy_source]
        first_token = 0
        for row, count in enumerate(plan.query_lens.tolist()):
            context, skipped = int(plan.context_lens[row]), int(table.skipped[row])
            places = np.arange(context - count, context)
            pages = table.pages[row, places // self.page_size - skipped]
            assert (pages != 0).all(), "a token was stored on the scratch page"
            kv[pages, places % self.page_size] = token_ids[first_token : first_token + count]
            first_token += count
            seen = np.arange(max(0, context - count - window + 1), context)
            found = kv[table.pages[row, seen // self.page_size - skipped], seen % self.page_size]
            want = self.kv[plan.page_table[row]].reshape(-1)[seen]
            if not (found == want).all():
                self.torn.add((plan.number, int(plan.row_slots[row])))


class DraftingExecutor(HashExecutor):
    """One whose drafts are right as often as `random` says. It knows lengths, and stores tokens of
    drafts that failed behind them."""

    def __init__(self, num_pages: int, page_size: int, max_slots: int, random, windows=()):
        super().__init__(num_pages, page_size, max_slots, bool(windows), windows)
        self.length = np.zeros(max_slots, np.int64)
        self._random = random

    def _run(self, plan: StepPlan) -> StepResult:
        if plan.begins is not None:
            self.length[plan.begins.slots] = plan.begins.lens
        self.kv[plan.copy_target] = self.kv[plan.copy_source]
        for kv, table in zip(self.others, plan.others, strict=True):
            kv[table.copy_target] = kv[table.copy_source]
        self.table[plan.write_slots] = plan.write_tokens
        tokens = np.zeros((len(plan.sample_slots), plan.width), np.int32)
        counts = np.ones(len(tokens), np.int32)
        drafted = np.zeros(len(tokens), np.int32)
        for row in range(plan.num_decodes):
            counts[row], drafted[row] = self._verify(plan, row, tokens[row])
        first = plan.decode_tokens
        for row in range(plan.num_decodes, len(plan.row_slots)):
            for at in range(first, first := first + int(plan.query_lens[row])):
                self._store(plan, row, int(plan.positions[at]), int(plan.token_ids[at]))
        rows = np.repeat(np.arange(len(plan.row_slots)), plan.query_lens)
        for draw in range(plan.num_decodes, len(tokens)):
            at = int(plan.sample_tokens[draw])
            context = self._context(plan, rows[at], int(plan.positions[at]) + 1)
            tokens[draw, 0] = self.table[plan.sample_slots[draw]] = next_token(context)
        self.lost = False
        finite = np.ones(len(tokens), np.bool_)
        return StepResult(tokens, finite, None, None, None, counts=counts, drafted=drafted)

    def _verify(self, plan: StepPlan, row: int, tokens: np.ndarray) -> tuple[int, int]:
        slot, bound = int(plan.row_slots[row]), int(plan.context_lens[row])
        length = int(self.length[slot])
        assert self.lost or bound >= length, "the host took the row for shorter than it is"
        valid = min(plan.width, max(0, bound - length))
        if length < plan.positions[row * plan.width]:  # The step that began it was lost.
            valid = 0
        count = self._random.randint(1, valid) if valid else 0
        for column in range(valid):
            token = self.table[slot] if column <= count else self._random.randrange(VOCAB)
            self._store(plan, row, length + column, int(token))
            if column < count:
                drawn = next_token(self._context(plan, row, length + column + 1))
                tokens[column] = self.table[slot] = drawn
        self.length[slot] += count
        return count, max(0, valid - 1)

    def _store(self, plan: StepPlan, row: int, position: int, token: int) -> None:
        page = plan.page_table[row, position // self.page_size]
        assert page != 0, "a token was stored on the scratch page"
        self.kv[page, position % self.page_size] = token
        for kv, table in zip(self.others, plan.others, strict=True):
            page = table.pages[row, position // self.page_size - table.skipped[row]]
            assert page != 0, "a token was stored on the scratch page"
            kv[page, position % self.page_size] = token

    def _context(self, plan: StepPlan, row: int, count: int) -> list[int]:
        context = self.kv[plan.page_table[row]].reshape(-1)[:count]
        assert self.lost or (context >= 0).all(), "KV was never written"
        for kv, table, window in zip(self.others, plan.others, self.windows, strict=True):
            seen = np.arange(max(0, count - window), count)
            pages = table.pages[row, seen // self.page_size - table.skipped[row]]
            if not (kv[pages, seen % self.page_size] == context[seen]).all():
                self.torn.add((plan.number, int(plan.row_slots[row])))
        return context.tolist()


class FakeLane:
    """A lane without a thread: a copy happens when the test lets it, or when it is looked for."""

    def __init__(self, name: str, move, page_bytes: int = 1):
        self.name, self.page_bytes = name, page_bytes
        self.ahead_pages = self.late = self.bytes_moved = self.failures = 0
        self.bytes_per_s = 1e9
        self.queued: list[Copy] = []
        self._move = move

    def expected_s(self, pages: int) -> float:
        return 0.0

    def put(self, copy: Copy) -> None:
        copy.due_s = time.monotonic() + 3600
        self.ahead_pages += len(copy.pages)
        self.queued.append(copy)

    def settle(self, copy: Copy) -> None:
        self.ahead_pages -= len(copy.pages)
        self.late -= copy.late
        self.failures += copy.failed and not copy.late
        self.bytes_moved += len(copy.pages)

    def mark_late(self, copy: Copy) -> None:
        copy.late = True
        self.late += 1
        self.failures += 1

    def run(self) -> Copy:
        copy = self.queued.pop(0)
        if not copy.failed:
            self._move(copy)
        return copy


class FakeLanes:
    """Both directions between a fake device's KV and slots of token ids. Each look ends as many
    copies as `random` says; None: all."""

    def __init__(self, kv, num_slots: int, random=None):
        slots = self.slots = np.full((num_slots, kv.shape[1]), -1, np.int64)

        def save(copy):
            slots[copy.slots] = kv[copy.pages]

        def load(copy):
            kv[copy.pages] = slots[copy.slots]

        self.saves, self.loads = FakeLane("save", save), FakeLane("load", load)
        self._random = random

    def wakes(self, wake) -> None:
        pass

    def ended(self) -> list[Copy]:
        ended = []
        for lane in (self.saves, self.loads):
            while lane.queued and (self._random is None or self._random.random() < 0.4):
                copy = lane.queued[0]
                if self._random is not None and not copy.late:
                    copy.failed = self._random.random() < 0.05
                    # A late one is seen late first, and ends at some later look.
                    if self._random.random() < 0.05:
                        copy.due_s = 0.0
                        break
                ended.append(lane.run())
        return ended

    def stop(self) -> bool:
        return True
