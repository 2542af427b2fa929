"""Events that a router reports for counting, each once and when it happens.

`telemetry.metrics.router.RouterMetrics` counts them; `NO_EVENTS` drops them.
"""

from __future__ import annotations

from typing import Final, Protocol


class RouterEvents(Protocol):
    """Receives events of requests and workers. Called on the event loop; never raises or waits."""

    def worker_attached(self, role: str, model: str) -> None:
        """A worker joined."""
        return

    def worker_lost(self, role: str, cause: str) -> None:
        """A worker is gone without an announced leave; `cause` is a short stable word."""
        return

    def role_asked(self, role: str, cause: str) -> None:
        """A worker was asked to take a role; `cause` is a short stable word."""
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

    def predicted(
        self, predicted_s: float, took_s: float, predicted_tokens: int, cached_tokens: int
    ) -> None:
        """An attempt's first token came after `took_s` seconds. The router had foretold
        `predicted_s`, and the cached tokens of its prompt."""
        return

    def computed_again(self, reason: str, pages: int) -> None:
        """A worker computed pages that another one holds; `reason` is a short stable word."""
        return

    def first_token(
        self, model: str, seconds: float | None, prompt_tokens: int, trace_id: str = ""
    ) -> None:
        """A request's first token left for the client, `seconds` after the request's arrival. None:
        that of a batch."""
        return

    def tokens(self, model: str, count: int, seconds_since_last: float | None) -> None:
        """A message of tokens left for the client. The time is None for a choice's first
        message."""
        return

    def unread(self) -> None:
        """An answer was given up shortly after its deadline, because its client did not read."""
        return

    def ended(
        self,
        model: str,
        outcome: str,
        duration_s: float | None,
        *,
        per_token_s: float | None = None,
        trace_id: str = "",
        method: str = "",
    ) -> None:
        """A request ended.

        Args:
            model: "" if the request named none that is served, so that clients choose no labels.
            outcome: "OK" or the reason of the error table.
            duration_s: since its arrival; None for one of a batch, which nobody waits for.
            per_token_s: mean time of a token after its choice's first; None if there was none.
            trace_id: "" if the request is not traced.
            method: that of a door, as in the access log.
        """
        return

    def adapter_ended(self, adapter: str, went_well: bool) -> None:
        """A request with an adapter ended; `ended` is called, too."""
        return

    def adapter_tokens(self, adapter: str, kind: str, count: int) -> None:
        """Tokens of a request with an adapter; `kind` is "prompt" or "output"."""
        return

    def batch_line(self, went_well: bool) -> None:
        """A line of a batch has its result."""
        return


class NoEvents(RouterEvents):
    """Drops every event."""


NO_EVENTS: Final = NoEvents()
