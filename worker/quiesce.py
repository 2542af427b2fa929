"""Asks over the routers whether a transfer is quiet.

The decode worker first asks the prefill worker directly, by a notification. If that path is broken
while both live, the quarantine would last until the path is mended. So there is a second path:

1. The decode worker's transfer thread finds that its questions are not answered. The worker asks
   every attached router to ask (`quiesce_wanted`), again and again until the quarantine is over.
2. A router that holds a stream to the prefill worker passes the question on (`quiesce`). Another
   one learns so that this start of it may be lost, and asks witnesses (`router.deaths.witness`).
3. The prefill worker posts nothing more of that transfer. Once nothing of it can land, it answers
   to all of its routers (`quiesced`). They pass the answer on to the decode worker. Until then it
   says nothing, and it is asked again.

Messages that come twice or too late change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.worker.v1 import worker_pb2
from kv_transfer.events import QuiesceAnswered, QuiesceUnanswered, TransferEvent

if TYPE_CHECKING:
    from kv_transfer.thread import TransferThread


class QuiesceRelay:
    """One worker's end of that path, on either side. Belongs to the event loop."""

    def __init__(
        self,
        transfer: TransferThread,
        agent_name: str,
        epoch: int,
        send_to_routers: Callable[[worker_pb2.WorkResponse], None],
    ) -> None:
        self._transfer = transfer
        self._agent_name = agent_name
        self._epoch = epoch
        self._send_to_routers = send_to_routers

    def on_transfer(self, event: TransferEvent) -> None:
        """Takes an event of the transfer thread, and ignores those of other owners."""
        match event:
            case QuiesceUnanswered():
                question = self._message(event.transfer_id, self._epoch, self._agent_name)
                question.prefill_agent_name = event.peer
                question.prefill_processes.extend(event.processes)
                self._send_to_routers(worker_pb2.WorkResponse(quiesce_wanted=question))
            case QuiesceAnswered():
                answer = self._message(event.transfer_id, event.decode_epoch, event.peer)
                answer.prefill_agent_name = self._agent_name
                self._send_to_routers(worker_pb2.WorkResponse(quiesced=answer))
            case _:
                pass

    def asked(self, question: worker_pb2.Quiesce) -> None:
        """Takes a decode worker's question from a router."""
        if question.prefill_agent_name == self._agent_name:
            self._transfer.quiesce(
                question.transfer_id, question.decode_agent_name, question.decode_epoch
            )

    def answered(self, answer: worker_pb2.Quiesce) -> None:
        """Takes a prefill worker's answer from a router."""
        if answer.decode_agent_name == self._agent_name:
            self._transfer.quiesced(
                answer.transfer_id, answer.prefill_agent_name, answer.decode_epoch
            )

    @staticmethod
    def _message(transfer_id: bytes, epoch: int, decode_agent: str) -> worker_pb2.Quiesce:
        return worker_pb2.Quiesce(
            transfer_id=transfer_id, decode_epoch=epoch, decode_agent_name=decode_agent
        )
