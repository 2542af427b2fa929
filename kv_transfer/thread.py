"""The transfer thread: the one thread of a process that owns its transport.

1. `start` builds the transport on the thread, with its pool registered.
2. Commands come through a queue. Between them the thread polls every 50 us just after a push was
   posted, every 200 us while a grant, a push or a self-test is open, every 20 ms while peers are
   known (they may ask to quiesce), and takes a turn every second otherwise: `turns` stands still
   where a turn does not end.
3. `stop` waits for pushes in progress, then releases the transport. A transport with a push still
   in progress is left as it is: the write would land all the same.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kv_transfer.events import TransferCounters, TransferEvent
from kv_transfer.exchange import ACTIVE_POLL_S, IDLE_POLL_S, Exchange
from kv_transfer.specs import ReceiveSpec, SendSpec, Source
from kv_transfer.types import Endpoint, KvTransport, TransportError
from kv_transfer.wire import Quiesce, Quiesced
from telemetry.trouble import describe

logger = logging.getLogger(__name__)

Command = Callable[[Exchange], None]

LONGEST_PAUSE_S = 1.0
START_TIMEOUT_S = 300.0
"""Registering the largest pool takes seconds; a driver that hangs would take for ever."""


class _Commands:
    """Commands of other threads, in order, for one that waits for them.

    The transfer thread waits here thousands of times a second. One timed lock is all that a wait
    takes. A `queue.Queue` makes a lock for each wait and takes two more: 36 us of CPU time instead
    of 28 for a wait of 200 us that nothing ends. The timed `get` of a SimpleQueue never ends if the
    time is up before it begins to wait.
    """

    def __init__(self) -> None:
        self._waiting: deque[Command] = deque()
        self._bell = threading.Lock()
        """Released after a command was put; held by whoever waits."""
        self._bell.acquire()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, command: Command) -> None:
        """Adds a command, from any thread."""
        self._waiting.append(command)
        with contextlib.suppress(RuntimeError):  # it rings already
            self._bell.release()

    def wait(self, pause_s: float) -> None:
        """Waits up to so long for a command. It may also return early without one."""
        self._bell.acquire(timeout=pause_s)

    def get(self) -> Command:
        """The oldest one, which must be there."""
        return self._waiting.popleft()


class TransferThread:
    """Posts pushes, polls, and keeps the states of every transfer of this process.

    Every method may be called from any thread and returns at once; what comes of it is reported to
    `on_event`, on the transfer thread, which must not block.
    """

    counters: TransferCounters

    def __init__(
        self,
        make_transport: Callable[[], KvTransport],
        epoch: int,
        on_event: Callable[[TransferEvent], None],
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.counters = TransferCounters()
        self.turns = 0
        """Counts on for as long as the thread lives."""
        self._make_transport = make_transport
        self._epoch = epoch
        self._on_event = on_event
        self._start_timeout_s = start_timeout_s
        self._commands = _Commands()
        self._started: queue.Queue[Endpoint | TransportError] = queue.Queue()
        self._stop_at_s: float | None = None
        self._left_nothing = True
        self._last_trouble = ""
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> Endpoint:
        """Builds the transport on the thread; blocks until it stands. Raises TransportError."""
        self._thread.start()
        try:
            result = self._started.get(timeout=self._start_timeout_s)
        except queue.Empty:
            raise TransportError("start_timeout", f"{self._start_timeout_s:g} s") from None
        if isinstance(result, TransportError):
            raise result
        return result

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread; waits for pushes in progress. True if none was left behind."""
        if not self._thread.is_alive():
            return self._left_nothing
        self._stop_at_s = time.monotonic() + timeout_s
        self._commands.put(lambda _: None)
        self._thread.join(timeout_s + 5.0)
        return self._left_nothing and not self._thread.is_alive()

    def meet(self, peer: Endpoint) -> None:
        """Wires up to a peer in the background: PeerOpened or PeerFailed."""
        self._commands.put(lambda exchange: exchange.meet(peer))

    def part(self, agent_name: str, proven_dead: bool) -> None:
        """A peer left. Only `proven_dead` lets anything out of quarantine."""
        self._commands.put(lambda exchange: exchange.part(agent_name, proven_dead))

    def begin_send(self, spec: SendSpec) -> None:
        """Prefill side: a grant arrived. Chunks reported before or after it are pushed."""
        self._commands.put(lambda exchange: exchange.sender.begin(spec))

    def chunk_computed(
        self,
        transfer_id: bytes,
        end_token: int,
        payload: bytes | None,
        sources: Sequence[Source],
    ) -> None:
        """Prefill side: KV of [0, end_token) is final, in the pages of `sources`, by group.
        `payload` is set with the last chunk, when the first tokens are known, and travels in the
        last notification."""
        self._commands.put(
            lambda exchange: exchange.sender.chunk_computed(
                transfer_id, end_token, payload, sources
            )
        )

    def abort_send(self, transfer_id: bytes) -> None:
        """Prefill side: send nothing more; SendQuiesced follows, also for an unknown transfer,
        which leaves a tombstone that refuses a later begin_send (SendQuiesced again)."""
        self._commands.put(lambda exchange: exchange.sender.abort(transfer_id))

    def expect(self, spec: ReceiveSpec) -> None:
        """Decode side: a grant was made; must be called before the grant is sent to anyone."""
        self._commands.put(lambda exchange: exchange.receiver.expect(spec))

    def abort_receive(self, transfer_id: bytes) -> None:
        """Decode side: compare-and-set. ReceiveAborted follows, and ReceiveFreed when the
        quarantine is over (never, where it was READY already)."""
        self._commands.put(lambda exchange: exchange.receiver.abort(transfer_id))

    def quiesce(self, transfer_id: bytes, decode_agent: str, decode_epoch: int) -> None:
        """Prefill side: the decode side gave a transfer up and asks by another path than its own.
        QuiesceAnswered follows, unless something can still land."""
        message = Quiesce(transfer_id, decode_epoch)
        self._commands.put(lambda exchange: exchange.quiesce(decode_agent, message))

    def quiesced(self, transfer_id: bytes, prefill_agent: str, decode_epoch: int) -> None:
        """Decode side: the answer to `QuiesceUnanswered`, by the other path."""
        message = Quiesced(transfer_id, decode_epoch)
        self._commands.put(lambda exchange: exchange.quiesced(prefill_agent, message))

    def _run(self) -> None:
        try:
            transport = self._make_transport()
            exchange = Exchange(transport, self._epoch, self._on_event, self.counters)
            endpoint = transport.endpoint
        except TransportError as error:
            self._started.put(error)
            return
        except Exception as error:
            logger.error("the transport could not be built: %s", describe(error))
            self._started.put(TransportError("internal", type(error).__name__))
            return
        self._started.put(endpoint)
        while not self._is_over(exchange):
            self._turn(exchange)
        self._left_nothing = not exchange.pushes_in_progress
        exchange.close()
        transport.shutdown()

    def _turn(self, exchange: Exchange) -> None:
        self.turns += 1
        try:
            self._run_commands(exchange, self._pause_s(exchange))
            exchange.work()
        except Exception as error:
            self._log_once(describe(error))
            time.sleep(IDLE_POLL_S)

    def _log_once(self, trouble: str) -> None:
        """A transport that is broken for good fails every turn in the same way."""
        if trouble != self._last_trouble:
            self._last_trouble = trouble
            logger.error("transfer turn failed: %s", trouble)

    def _pause_s(self, exchange: Exchange) -> float:
        if self._stop_at_s is not None:
            return ACTIVE_POLL_S
        pause_s = exchange.pause_s()
        return LONGEST_PAUSE_S if pause_s is None else min(pause_s, LONGEST_PAUSE_S)

    def _run_commands(self, exchange: Exchange, pause_s: float) -> None:
        """Waits up to `pause_s` for a command, looks for notifications, and runs every command that
        waits by then.

        In this order: a chunk may be there already whose `expect` is the last command in the queue,
        but none is found whose `expect` is not queued yet.
        """
        self._commands.wait(pause_s)
        exchange.look()
        for _ in range(len(self._commands)):
            exchange.run_command(self._commands.get())

    def _is_over(self, exchange: Exchange) -> bool:
        if self._stop_at_s is None:
            return False
        is_idle = not self._commands and not exchange.pushes_in_progress
        return is_idle or time.monotonic() >= self._stop_at_s
