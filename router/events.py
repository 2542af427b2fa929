"""What a router tells whoever counts: each thing once, when it happens.

`telemetry.metrics.router.RouterMetrics` counts; `NO_EVENTS` is for those who need no figures.
"""

from __future__ import annotations

from typing import Final, Protocol


class RouterEvents(Protocol):
    """Hears of requests and workers. Called on the event loop; never raises, never waits."""

    def worker_attached(self, role: str, model: str) -> None:
        """A worker joined."""
        return

    def worker_lost(self, role: str, cause: str) -> None:
        """A worker is gone that had not said that it leaves; `cause` is a short stable word."""
        return

    def rejected(self, reason: str) -> None:
        """A request was refused before any work; `reason` is one of the error table's."""
        return

    def waited(self, seconds: float) -> None:
        """A request left the queue for a worker."""
        return

    def retried(self, cause: str) -> None:
        """An attempt failed before the first token, and another begins."""
        return

    def failed_over(self, cause: str) -> None:
        """An attempt failed after the first token, and the stream goes on with another."""
        return

    def prefilled_locally(self, reason: str) -> None:
        """A decode worker computes an attempt's prompt; `reason` is a short stable word."""
        return

    def first_token(
        self, model: str, seconds: float, prompt_tokens: int, trace_id: str = ""
    ) -> None:
        """A request's first token left for the client, so long after its arrival."""
        return

    def tokens(self, model: str, count: int, seconds_since_last: float | None) -> None:
        """A message of tokens left for the client; None for its choice's first."""
        return

    def unread(self) -> None:
        """An answer was given up a little after its deadline, because its client did not read."""
        return

    def ended(
        self,
        model: str,
        outcome: str,
        duration_s: float,
        *,
        per_token_s: float | None = None,
        trace_id: str = "",
    ) -> None:
        """A request ended.

        Args:
            model: "" where it named none that is served: whoever asks chooses no label.
            outcome: "OK" or the reason of the error table.
            duration_s: since its arrival.
            per_token_s: mean time of a token after its choice's first; None where there was none.
            trace_id: "" where it is not traced.
        """
        return


class NoEvents(RouterEvents):
    """Hears and forgets."""


NO_EVENTS: Final = NoEvents()
