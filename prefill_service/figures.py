"""How the attempts of a prefill worker stand: for load reports, metrics and a drain."""

from __future__ import annotations

from collections.abc import Mapping

from baton.worker_attempts import Attempts
from baton.worker_overdue import Unended
from baton.worker_wire import kv_tokens
from prefill_service.attempt import PrefillAttempt
from prefill_service.outgoing import OutgoingPrompt


class PrefillFigures:
    """Counted anew each time. Belongs to the event loop, as the attempts do."""

    def __init__(
        self, attempts: Attempts[PrefillAttempt], outgoing: Mapping[bytes, OutgoingPrompt]
    ) -> None:
        self._attempts = attempts
        self._outgoing = outgoing
        """By attempt."""

    @property
    def active(self) -> int:
        """Attempts under way, quiescing ones included."""
        return len(self._attempts)

    @property
    def ungranted_tokens(self) -> int:
        """Tokens of prompts taken on whose destination is not known yet."""
        return sum(
            kv_tokens(attempt.request)
            for attempt in self._attempts
            if attempt.peer
            and (outgoing := self._outgoing.get(attempt.id)) is not None
            and outgoing.destination is None
        )

    def unended_sends(self) -> list[Unended]:
        """Every attempt that waits for nothing but the end of its send."""
        now_s = self._attempts.clock()
        return [
            Unended(attempt.peer, now_s - attempt.sending_s)
            for attempt in self._attempts
            if attempt.sending_s is not None
        ]
