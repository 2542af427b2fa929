"""Hooks that break on purpose, at the point that their option names."""

from __future__ import annotations

import os
import time

import numpy as np
import torch

from engine.step.hooks import AttentionHook, ExtensionError, Hook, HookTag, Narrowed, OnFailure

POINTS = (
    "request_began",
    "request_ended",
    "step_began",
    "step_ended",
    "rows_narrowed",
    "choosing_began",
    "attention_began",
    "pages_wanted",
    "attention_ended",
)


class Breaking(AttentionHook):
    """Has to do with the requests that name it. It raises at `at`, or sleeps there."""

    chooses_pages = True

    def __init__(self, options, on_failure: OnFailure) -> None:
        self.at, self.how = options.get("at", ""), options.get("how", "raise")
        self.on_failure = on_failure
        self.heard: list[str] = []
        self._mine = False

    def _hit(self, point: str, mine: bool = True) -> None:
        self.heard.append(point)
        if point == self.at and mine:
            if self.how == "sleep":
                time.sleep(0.3)
            else:
                raise ZeroDivisionError(point)

    def request_began(self, request, extension):
        if extension is None:
            return None
        if extension == b"nonsense":
            raise ExtensionError("no")
        self._hit("request_began")
        return HookTag(7, len(request.prompt_ids))

    def request_ended(self, request_id):
        self._hit("request_ended")

    def step_began(self, step):
        self._step, self._mine = step, bool(step.tags.any())
        assert set(step.tags.tolist()) <= {0, 7}
        self._hit("step_began", self._mine)

    def step_ended(self, step):
        self._hit("step_ended", self._mine)

    def rows_narrowed(self, step):
        self._hit("rows_narrowed", bool(step.tags.any()))
        rows = np.flatnonzero(step.tags[: step.num_decodes])
        self._rows = rows
        return Narrowed(rows, np.ones(len(rows), np.int32))

    def choosing_began(self, rows):
        self._hit("choosing_began", self._mine)

    def attention_began(self, layer, q, k, v):
        self._hit("attention_began", self._mine)

    def pages_wanted(self, layer, q):
        self._hit("pages_wanted", self._mine)
        return torch.zeros((len(q), 2, 1), dtype=torch.int64)

    def attention_ended(self, layer, q, out):
        self._hit("attention_ended", self._mine)


class OnRank1(AttentionHook):
    """Has to do with the requests that name it, which read their first page and their last. It
    raises on rank 1 at the point that their bytes name."""

    chooses_pages = True
    graph_pages = 2

    def __init__(self, *, capturable: bool, attaches: bool) -> None:
        self.capturable, self._attaches = capturable, attaches
        self._is_there = os.environ.get("RANK") == "1"
        self._tags: set[int] = set()

    def _hit(self, point: str) -> None:
        if self._is_there and 1 + POINTS.index(point) in self._tags:
            raise ZeroDivisionError(point)

    def attach(self, site):
        if self._is_there and not self._attaches:
            raise ZeroDivisionError
        self._heads = site.pool.num_kv_heads

    def request_began(self, request, extension):
        if extension is None:
            return None
        return HookTag(1 + POINTS.index(extension.decode()) if extension else 99)

    def rows_narrowed(self, step):
        self._tags = set(step.tags.tolist())
        self._hit("rows_narrowed")
        rows = np.flatnonzero(step.tags[: step.num_decodes])
        pages = -(-step.context_lens[rows] // step.page_size)
        return Narrowed(rows, np.minimum(pages, 2))

    def step_began(self, step):
        self._tags = set(step.tags.tolist())
        self._hit("step_began")

    def choosing_began(self, rows):
        self._most = rows.most
        self._hit("choosing_began")

    def attention_began(self, layer, q, k, v):
        self._hit("attention_began")

    def pages_wanted(self, layer, q):
        self._hit("pages_wanted")
        shape = len(q), self._heads, self._most
        return torch.zeros(shape, dtype=torch.int64, device=q.device)

    def attention_ended(self, layer, q, out):
        self._hit("attention_ended")

    def step_ended(self, step):
        self._hit("step_ended")


class SlowAtFirst(AttentionHook):
    """Has to do with all requests. Its first call at each point in layers is slow, as if it
    compiled, or raises."""

    chooses_pages = True
    capturable = True
    graph_pages = 2

    def __init__(self, options) -> None:
        self._raises = options.get("how") == "raise"
        self._came: set[tuple[str, int]] = set()

    def _come(self, point: str, layer: int = 0) -> None:
        if (point, layer) not in self._came:
            self._came.add((point, layer))
            if self._raises:
                raise ZeroDivisionError
            time.sleep(0.1)

    def attach(self, site):
        self._heads = site.pool.num_kv_heads

    def request_began(self, request, extension):
        return HookTag(1)

    def rows_narrowed(self, step):
        rows = np.flatnonzero(step.tags[: step.num_decodes])
        return Narrowed(rows, np.minimum(-(-step.context_lens[rows] // step.page_size), 2))

    def choosing_began(self, rows):
        self._rows = rows
        self._come(f"choosing {rows.table.dtype} {rows.counts.dtype} {rows.contexts.dtype}")

    def pages_wanted(self, layer, q):
        self._come("pages", layer)
        shape = len(q), self._heads, self._rows.most
        return torch.zeros(shape, dtype=torch.int64, device=q.device)

    def attention_began(self, layer, q, k, v):
        self._come(f"began {q.dtype} {k.shape[1:]}", layer)

    def attention_ended(self, layer, q, out):
        self._come(f"ended {out.dtype} {q.shape[1:]}", layer)


class OfSteps(Hook):
    """Breaks in the steps of all requests, and leaves them."""

    on_failure = OnFailure.LEAVE

    def request_began(self, request, extension):
        return HookTag(1)

    def step_began(self, step):
        if step.tags.any():
            raise ZeroDivisionError


class Quiet(AttentionHook):
    """Has to do with all requests, and does nothing."""

    def __init__(self, *, capturable: bool) -> None:
        self.capturable = capturable

    def request_began(self, request, extension):
        return HookTag(1)

    def attention_began(self, layer, q, k, v):
        return


def quiet(options):
    return Quiet(capturable=options["graphs"] == "yes")


def slow_at_first(options):
    return SlowAtFirst(options)


def on_rank_1(options):
    return OnRank1(
        capturable=options.get("graphs") == "yes", attaches=options.get("attaches") != "no"
    )


def fails(options):
    return Breaking(options, OnFailure.FAIL)


def leaves(options):
    return Breaking(options, OnFailure.LEAVE)


def of_steps(options):
    return OfSteps()


def both(options):
    hook = AttentionHook()
    hook.needs_both = True
    return hook


def nonsense(options):
    raise ZeroDivisionError
