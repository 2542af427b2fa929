"""Messages between two workers that are attached here. The router passes them on, unchanged.

A worker may only speak for itself: a message is dropped if it names another sender than the worker
that it came from. Answers free pages, so nobody else may give them.

- `quiesce_wanted` goes from a decode worker to its prefill worker, and `quiesced` back. If that is
  not here, its end is what the decode worker waits for: `deaths` is told.
- `fetch` goes from the worker that lacks pages to the one that is said to hold them. It is sent
  once. So if it cannot be passed on, the router itself refuses it. `fetch_refused` goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from router.deaths.witness import Deaths
    from router.workers.link import WorkerLink

FETCHING: Final = frozenset({"nixl", "loopback"})
"""Transports by which any two workers may move pages. NCCL wires up the pairs of hand-offs."""
HOLDER_GONE: Final = "holder_gone"


def fetches(worker: WorkerLink) -> bool:
    """Whether the worker fetches pages, and gives its own, at all. Workers of several ranks do not
    yet."""
    endpoint = worker.identity.endpoint
    return bool(worker.agent_name) and endpoint.transport in FETCHING and not endpoint.ranks


def can_fetch(fetcher: WorkerLink, holder: WorkerLink) -> bool:
    """Whether the one may get KV pages that the other holds, whatever their roles are."""
    one, other = fetcher.identity, holder.identity
    return (
        fetcher is not holder
        and fetches(fetcher)
        and fetches(holder)
        and one.model.fingerprint == other.model.fingerprint
        and one.endpoint.transport == other.endpoint.transport
    )


def is_reachable(worker: WorkerLink, peer: WorkerLink) -> bool:
    """Whether a worker could fetch from a peer, the rate of their path is known, and neither
    complains of the other."""
    if not path_rate(worker, peer) or worker.avoids(peer) or peer.avoids(worker):
        return False
    return can_fetch(worker, peer)


def path_rate(worker: WorkerLink, peer: WorkerLink) -> float:
    """Bytes a second between two workers; 0: unknown, so that nothing is fetched."""
    return worker.path_bytes_per_s(peer) or peer.path_bytes_per_s(worker)


class Between:
    """Passes messages on.

    Args:
        members: the attached workers.
        deaths: of the router.
    """

    def __init__(self, members: Callable[[], Sequence[WorkerLink]], deaths: Deaths) -> None:
        self._members = members
        self._deaths = deaths

    def passed_on(self, sender: WorkerLink, message: worker_pb2.WorkResponse) -> bool:
        """Whether the message was for another worker. Then it is dealt with."""
        match message.WhichOneof("message"):
            case "quiesce_wanted":
                self._ask(sender, message.quiesce_wanted)
            case "quiesced":
                self._answer(sender, message.quiesced)
            case "fetch":
                self._fetch(sender, message.fetch)
            case "fetch_refused":
                self._refuse(sender, message.fetch_refused)
            case _:
                return False
        return True

    def _ask(self, decode: WorkerLink, question: worker_pb2.Quiesce) -> None:
        if question.decode_agent_name != decode.agent_name:
            return
        name = question.prefill_agent_name
        if (prefill := self._member(name)) is not None:
            prefill.send(worker_pb2.WorkRequest(quiesce=question))
        elif self._deaths.asked(name, question.prefill_processes):
            part = worker_pb2.Part(agent_name=name, proven_dead=True)
            decode.send(worker_pb2.WorkRequest(part=part))

    def _answer(self, prefill: WorkerLink, answer: worker_pb2.Quiesce) -> None:
        decode = self._member(answer.decode_agent_name)
        if decode is not None and answer.prefill_agent_name == prefill.agent_name:
            decode.send(worker_pb2.WorkRequest(quiesced=answer))

    def _fetch(self, fetcher: WorkerLink, fetch: worker_pb2.Fetch) -> None:
        if fetch.fetcher_agent_name != fetcher.agent_name:
            return
        holder = self._member(fetch.holder_agent_name)
        if holder is not None and can_fetch(fetcher, holder):
            holder.send(worker_pb2.WorkRequest(fetch=fetch))
            return
        refused = worker_pb2.FetchRefused(
            transfer_id=fetch.transfer_id,
            fetcher_epoch=fetch.fetcher_epoch,
            fetcher_agent_name=fetch.fetcher_agent_name,
            holder_agent_name=fetch.holder_agent_name,
            cause=HOLDER_GONE,
        )
        fetcher.send(worker_pb2.WorkRequest(fetch_refused=refused))

    def _refuse(self, holder: WorkerLink, refused: worker_pb2.FetchRefused) -> None:
        fetcher = self._member(refused.fetcher_agent_name)
        if fetcher is not None and refused.holder_agent_name == holder.agent_name:
            fetcher.send(worker_pb2.WorkRequest(fetch_refused=refused))

    def _member(self, agent_name: str) -> WorkerLink | None:
        members = self._members()
        return next((link for link in members if link.agent_name == agent_name), None)
