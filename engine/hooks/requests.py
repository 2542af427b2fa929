"""Hooks and requests, on the step loop's thread of rank 0.

A request's terms are asked for once, when it comes. They stand in columns by slot, so a plan takes
those of its rows at once. `engine.schedule.recovery` deals with a hook that has failed in a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.hooks.calling import Caller, HookFailure
from engine.hooks.protocol import ExtensionError, Hook, Int32s, OnFailure, Term
from engine.types import FailureReason, Request, RequestFailed

if TYPE_CHECKING:
    from engine.schedule.sequences import ActiveRequest


class RequestHooks:
    """The hooks as the scheduler sees them."""

    def __init__(self, hooks: Sequence[Hook], max_slots: int, limit_s: float) -> None:
        self._callers = [Caller(index, hook, limit_s) for index, hook in enumerate(hooks)]
        self._names = frozenset(hook.name for hook in hooks)
        self.terms: Int32s = np.zeros((len(hooks), max_slots), np.int32)
        """By hook and slot; 0: the hook leaves the sequence alone."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """By hook and point, since the start."""

    def began(self, active: ActiveRequest) -> RequestFailed | None:
        """Asks the hooks about a request. Returns why it cannot run; None: it can."""
        request = active.request
        if unknown := set(request.extensions) - self._names:
            return RequestFailed(request.id, FailureReason.EXTENSION, min(unknown))
        terms = []
        for caller in self._callers:
            try:
                term = self._ask(caller, request)
            except ExtensionError:
                return RequestFailed(request.id, FailureReason.EXTENSION, caller.hook.name)
            if caller.failure is not None:
                self.count(caller.failure)
                if caller.hook.on_failure is OnFailure.FAIL:
                    return RequestFailed(request.id, FailureReason.HOOK, caller.hook.name)
            terms.append(term.value if term else 0)
            if term:
                active.exact_tokens = min(active.exact_tokens, term.exact_tokens)
        active.terms = tuple(terms)
        return None

    def _ask(self, caller: Caller, request: Request) -> Term | None:
        """A hook's term for a request.

        Raises:
            ExtensionError: the request's bytes mean nothing to it.
        """
        refused: list[ExtensionError] = []

        def request_began() -> Term | None:
            try:
                return caller.hook.request_began(request, request.extensions.get(caller.hook.name))
            except ExtensionError as error:
                refused.append(error)
                return None

        caller.restart()
        term = caller.call(request_began)
        if refused:
            raise refused[0]
        return term

    def entered(self, slot: int, active: ActiveRequest) -> None:
        """A sequence of the request has got a slot."""
        self.terms[:, slot] = active.terms

    def ended(self, active: ActiveRequest) -> None:
        """The engine holds nothing of the request any more."""
        for caller, term in zip(self._callers, active.terms, strict=False):
            if term:
                caller.restart()
                caller.call(caller.hook.request_ended, active.request.id)
                if caller.failure:
                    self.count(caller.failure)

    def leave(self, active: ActiveRequest, index: int) -> None:
        """A hook leaves a request alone from now on. What it has done counts as inexact still."""
        terms = list(active.terms)
        terms[index] = 0
        active.terms = tuple(terms)
        for sequence in active.sequences:
            if sequence.slot >= 0:
                self.terms[:, sequence.slot] = terms

    def hook(self, failure: HookFailure) -> Hook:
        """The hook that has failed."""
        return self._callers[failure.hook].hook

    def count(self, failure: HookFailure) -> None:
        """Counts a failure."""
        self.failures[failure.name, failure.point] += 1


def ask_hooks(hooks: RequestHooks | None, active: ActiveRequest) -> RequestFailed | None:
    """Asks the hooks there are about a request that has come. See `RequestHooks.began`."""
    if hooks is not None:
        return hooks.began(active)
    request = active.request
    if not request.extensions:
        return None
    return RequestFailed(request.id, FailureReason.EXTENSION, min(request.extensions))
