"""Hooks that return what they must not, in the way that their option names."""

from __future__ import annotations

import numpy as np
import torch

from engine.step.hooks import AttentionHook, ExtensionError, Hook, HookTag, Narrowed, OnFailure

TAGS = {
    "no tag": 7,
    "huge": HookTag(1 << 40),
    "zero": HookTag(0),
    "text": HookTag("7"),
    "before the start": HookTag(7, -8),
}


class Wrong(AttentionHook):
    """Has to do with the requests that name it, and leaves them when it has failed."""

    chooses_pages = True
    on_failure = OnFailure.LEAVE

    def __init__(self, how: str) -> None:
        self._how = how
        self.ended: list[bytes] = []

    def request_began(self, request, extension):
        if extension is None:
            return None
        if self._how == "leaves the process at once":
            raise SystemExit
        return TAGS.get(self._how, HookTag(7))

    def request_ended(self, request_id):
        self.ended.append(request_id)

    def step_began(self, step):
        if self._how == "leaves the process" and step.tags.any():
            raise SystemExit

    def rows_narrowed(self, step):
        self._step, count = step, step.num_decodes
        rows = np.flatnonzero(step.tags[:count])
        if not rows.size:
            return None
        counts = np.ones(len(rows), np.int32)
        wrong = {
            "a pair": (rows, counts),
            "rows beyond": Narrowed(rows + 1000, counts),
            "prompt rows": Narrowed(np.array([count]), np.ones(1, np.int32)),
            "neighbours": Narrowed(np.arange(count), np.ones(count, np.int32)),
            "twice": Narrowed(np.repeat(rows, 2), np.repeat(counts, 2)),
            "no pages": Narrowed(rows, counts * 0),
            "too many pages": Narrowed(rows, counts * 1000),
            "fewer counts": Narrowed(rows, counts[:0]),
        }
        return wrong.get(self._how, Narrowed(rows, counts + 1))

    def pages_wanted(self, layer, q):
        heads = 2
        match self._how:
            case "no tensor":
                return [[0]]
            case "fractions":
                return torch.zeros(len(q), heads, 2)
            case "below":
                return torch.tensor([-3, 0]).expand(len(q), heads, 2)
            case "above":
                return torch.tensor([0, 1 << 40]).flip(0).expand(len(q), heads, 2)
        return torch.zeros(len(q), heads, 2, dtype=torch.int64)


class Late(AttentionHook):
    """Has to do with the requests that name it, and breaks in the sixth of its steps."""

    chooses_pages = True

    def __init__(self, on_failure: OnFailure) -> None:
        self.on_failure, self._steps = on_failure, 0

    def request_began(self, request, extension):
        return None if extension is None else HookTag(1)

    def rows_narrowed(self, step):
        self._rows = np.flatnonzero(step.tags[: step.num_decodes])
        self._steps += bool(self._rows.size)
        pages = -(-step.context_lens[self._rows] // step.page_size)
        return Narrowed(self._rows, pages)

    def pages_wanted(self, layer, q):
        if layer == 1 and self._steps == 6:
            raise ZeroDivisionError
        return


class Counting(Hook):
    """Gives each request a tag of its own, and raises if a step has one whose request ended."""

    def __init__(self) -> None:
        self.began: dict[bytes, int] = {}
        self.ended: list[bytes] = []
        self._gone: set[int] = set()

    def request_began(self, request, extension):
        self.began[request.id] = len(self.began) + 1
        return HookTag(self.began[request.id])

    def request_ended(self, request_id):
        self.ended.append(request_id)
        self._gone.add(self.began[request_id])

    def step_began(self, step):
        assert not self._gone & set(step.tags.tolist())


class Refusing(Hook):
    """Refuses each request that names it."""

    def request_began(self, request, extension):
        if extension is not None:
            raise ExtensionError("no")


def wrong(options):
    return Wrong(options["how"])


def late(options):
    return Late(OnFailure(options["then"]))


def counting(options):
    return Counting()


def refusing(options):
    return Refusing()


class Boundless(Hook):
    def page_bytes(self, pool):
        raise ZeroDivisionError


def boundless(options):
    return Boundless()


def no_hook(options):
    return object()
