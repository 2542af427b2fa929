"""Hooks and requests, on the step loop's thread of rank 0.

A request's tags are asked for once, when it comes. They stand in columns by slot, so a plan takes
those of its rows at once. `engine.schedule.recovery` deals with a hook that has failed in a step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.bounds import UNBOUNDED
from engine.hooks.calling import Caller
from engine.hooks.checking import check_tag
from engine.step.hooks import (
    AttentionHook,
    ExtensionError,
    Hook,
    HookFailure,
    HookTag,
    Int32s,
    OnFailure,
)
from engine.types import FailureReason, Request, RequestFailed


@dataclass(eq=False, slots=True)
class HookedRequest:
    """A request, and what the hooks have to do with it."""

    request: Request
    tags: tuple[int, ...] = ()
    """By hook, if there are hooks (`engine.step.hooks.HookTag`)."""
    heard_by: tuple[int, ...] = ()
    """The hooks that hear of its end, by their indices."""
    exact_tokens: int = UNBOUNDED
    """KV that is decoded here from this index on is never keyed, since a hook has changed it."""


class RequestHooks:
    """The hooks as the scheduler sees them."""

    def __init__(self, hooks: Sequence[Hook], max_slots: int, limit_s: float) -> None:
        self._callers = [Caller(index, hook, limit_s) for index, hook in enumerate(hooks)]
        self._names = frozenset(hook.name for hook in hooks)
        self.tags: Int32s = np.zeros((len(hooks), max_slots), np.int32)
        """By hook and slot; 0: the hook leaves the sequence alone."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """By hook and point, since the start."""
        self._ended: deque[tuple[int, HookedRequest]] = deque()
        """Requests that ended, each with the last step that may have a row of it."""
        self._settled_step = -1

    def began(self, hooked: HookedRequest) -> RequestFailed | None:
        """Asks the hooks about a request. Returns why it cannot run; None: it can."""
        request = hooked.request
        if unknown := set(request.extensions) - self._names:
            return RequestFailed(request.id, FailureReason.EXTENSION, min(unknown))
        tags, refusal = [], None
        for caller in self._callers:
            try:
                tag = self._ask(caller, hooked)
            except ExtensionError:
                refusal = RequestFailed(request.id, FailureReason.EXTENSION, caller.hook.name)
                break
            if caller.failure is not None:
                self.count(caller.failure)
                if caller.hook.on_failure is OnFailure.FAIL:
                    refusal = RequestFailed(request.id, FailureReason.HOOK, caller.hook.name)
                    break
            tags.append(tag.value if tag else 0)
            if tag:
                exact = _exact_tokens(caller.hook, tag, request)
                hooked.exact_tokens = min(hooked.exact_tokens, exact)
        hooked.tags = tuple(tags)
        if refusal is not None:
            self._report_end(hooked)
        return refusal

    def _ask(self, caller: Caller, hooked: HookedRequest) -> HookTag | None:
        """A hook's tag for a request. A tag that comes too late has an end, too.

        Raises:
            ExtensionError: the request's bytes mean nothing to it.
        """
        refused: list[ExtensionError] = []
        request = hooked.request

        def request_began() -> HookTag | None:
            try:
                return caller.hook.request_began(request, request.extensions.get(caller.hook.name))
            except ExtensionError as error:
                refused.append(error)
                return None

        def check(tag: object) -> HookTag | None:
            checked = check_tag(tag)
            if checked is not None:
                hooked.heard_by += (caller.index,)
            return checked

        caller.restart()
        tag = caller.call(request_began, check=check)
        if refused:
            raise refused[0]
        return tag

    def entered(self, slot: int, hooked: HookedRequest) -> None:
        """A sequence of the request has got a slot."""
        self.tags[:, slot] = hooked.tags

    def ended(self, hooked: HookedRequest, step: int) -> None:
        """The engine holds nothing of the request any more. Steps up to `step` may have a row of
        it, so its hooks hear of the end when that has settled."""
        if hooked.heard_by:
            self._ended.append((step, hooked))
            self.settled(self._settled_step)

    def settled(self, step: int) -> None:
        """Step `step` and all before it are done."""
        self._settled_step = step
        while self._ended and self._ended[0][0] <= step:
            self._report_end(self._ended.popleft()[1])

    def _report_end(self, hooked: HookedRequest) -> None:
        for index in hooked.heard_by:
            caller = self._callers[index]
            caller.restart()
            caller.call(caller.hook.request_ended, hooked.request.id)
            if caller.failure:
                self.count(caller.failure)

    def leave(self, hooked: HookedRequest, index: int, slots: Sequence[int]) -> None:
        """A hook leaves a request, which has these slots, alone from now on. What it has done
        counts as inexact still."""
        tags = list(hooked.tags)
        tags[index] = 0
        hooked.tags = tuple(tags)
        for slot in slots:
            self.tags[:, slot] = tags

    def hook(self, failure: HookFailure) -> Hook:
        """The hook that has failed."""
        return self._callers[failure.hook].hook

    def count(self, failure: HookFailure) -> None:
        """Counts a failure."""
        self.failures[failure.name, failure.point] += 1


def _exact_tokens(hook: Hook, tag: HookTag, request: Request) -> int:
    if tag.exact_tokens is not None:
        return tag.exact_tokens
    chooses = isinstance(hook, AttentionHook) and hook.chooses_pages
    return len(request.prompt_ids) if chooses else UNBOUNDED


def ask_hooks(hooks: RequestHooks | None, hooked: HookedRequest) -> RequestFailed | None:
    """Asks the hooks there are about a request that has come. See `RequestHooks.began`."""
    if hooks is not None:
        return hooks.began(hooked)
    request = hooked.request
    if not request.extensions:
        return None
    return RequestFailed(request.id, FailureReason.EXTENSION, min(request.extensions))
