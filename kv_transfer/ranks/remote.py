"""A rank's part in another process: what rank 0's transfer thread asks, and what serves it there.

Both ends have one PAIR socket of pyzmq, in a private folder of the host. Frames are raw: a word,
then its arguments. No pickle.

    BUILD     transport, agent name            answered: the endpoint
    OPEN      endpoint, pieces by group        answered: nothing, or an error
    PUSH      handle u64 and group u8, agent, source pages i32, target pages i32, payload
    CLOSE     agent
    ASK                                        answered: [handle u64, state u8] each, then agent
                                               and payload of each notification
    SHUTDOWN                                   answered: nothing

An answer is OK with its frames, or ERROR with cause and detail. A rank does one thing after the
other, so answers come in order. It sleeps until it is asked, and polls only then: rank 0 has the
pace (`kv_transfer.exchange.Exchange.pause_s`).
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

import numpy as np
import zmq

from faults import failpoints
from kv_transfer.ranks.part import LocalPart, Told
from kv_transfer.types import (
    Endpoint,
    KvTransport,
    Notification,
    PageGroup,
    PageIds,
    Piece,
    Pieces,
    PushState,
    TransportError,
)
from telemetry.trouble import describe

logger = logging.getLogger(__name__)

BUILD: Final = b"build"
OPEN: Final = b"open"
PUSH: Final = b"push"
CLOSE: Final = b"close"
ASK: Final = b"ask"
SHUTDOWN: Final = b"shutdown"
OK: Final = b"ok"
ERROR: Final = b"error"

_HANDLE: Final = struct.Struct("<QB")
_ENDED: Final = struct.Struct("<QB")
LOOK_MS: Final = 200
"""While it waits, rank 0 looks this often whether the rank still lives."""

Make = Callable[[str, str], KvTransport]
"""Makes a transport of this name, with an agent of that name."""
Socket = zmq.Socket[bytes]


class RemotePart:
    """Rank 0's end. A `Part`."""

    def __init__(
        self, socket: Socket, transport: str, agent_name: str, lost: Callable[[], str]
    ) -> None:
        """Has the rank begin to build its transport; `built` waits for that.

        Args:
            socket: to the rank; belongs to this object's thread from now on.
            transport: its name.
            agent_name: the rank's.
            lost: why the ranks are lost; empty while they are not.
        """
        self._socket = socket
        self._lost = lost
        self._endpoint: Endpoint | None = None
        self._send(BUILD, transport.encode(), agent_name.encode())

    def built(self) -> RemotePart:
        """Waits for the transport. Raises TransportError where it cannot be built."""
        (endpoint,) = self._answer()
        self._endpoint = endpoint_of(endpoint)
        return self

    @property
    def endpoint(self) -> Endpoint:
        """See `Part`."""
        assert self._endpoint is not None, "it is built"
        return self._endpoint

    def open(self, peer: Endpoint, pieces: Sequence[Pieces]) -> None:
        """See `Part`."""
        self._send(OPEN, endpoint_frame(peer), json.dumps(pieces).encode())
        self._answer()

    def path(self, agent_name: str) -> str:
        """See `Part`. Rank 0 alone is asked."""
        raise NotImplementedError

    def push(
        self,
        handle: int,
        agent_name: str,
        source: PageIds,
        target: PageIds,
        payload: bytes,
        group: int,
    ) -> None:
        """See `Part`. What cannot be started there is told as an error."""
        pages = (np.ascontiguousarray(each, np.int32).tobytes() for each in (source, target))
        self._send(PUSH, _HANDLE.pack(handle, group), agent_name.encode(), *pages, payload)

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `Part`. Rank 0 alone is asked."""
        raise NotImplementedError

    def ask(self) -> None:
        """See `Part`."""
        self._send(ASK)

    def told(self) -> Told:
        """See `Part`."""
        ended, *words = self._answer()
        notifications = [
            Notification(agent.decode(), payload)
            for agent, payload in zip(words[::2], words[1::2], strict=True)
        ]
        states = [(handle, PushState(state)) for handle, state in _ENDED.iter_unpack(ended)]
        return Told(states, notifications)

    def close(self, agent_name: str) -> None:
        """See `Part`."""
        self._send(CLOSE, agent_name.encode())

    def shutdown(self) -> None:
        """See `Part`."""
        if not self._lost():
            self._send(SHUTDOWN)
            self._answer()

    def _send(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def _answer(self) -> list[bytes]:
        """The next answer. Raises TransportError: the rank's, or `rank_lost`."""
        while not self._socket.poll(LOOK_MS):
            if why := self._lost():
                raise TransportError("rank_lost", why)
        kind, *words = self._socket.recv_multipart()
        if kind == ERROR:
            raise TransportError(*(word.decode() for word in words))
        return words


class RankAgent:
    """The end in the rank's process. It belongs to one thread there."""

    def __init__(self, socket: Socket, rank: int, make: Make) -> None:
        """Serves rank 0 over `socket`; `make` makes the rank's transport."""
        self._socket = socket
        self._rank = str(rank)
        self._make = make
        self._part: LocalPart | None = None
        self._failed: list[tuple[int, PushState]] = []

    def serve(self) -> None:
        """Does what rank 0 asks, until SHUTDOWN."""
        while True:
            word, *arguments = self._socket.recv_multipart()
            if word == PUSH:
                failpoints.hit("rank.push", self._rank)
                self._push(*arguments)
                continue
            if word == CLOSE:
                self._built.close(arguments[0].decode())
                continue
            self._socket.send_multipart(self._answer(word, arguments))
            if word == SHUTDOWN:
                return

    def _answer(self, word: bytes, arguments: list[bytes]) -> list[bytes]:
        try:
            return [OK, *self._do(word, arguments)]
        except TransportError as error:
            return [ERROR, error.cause.encode(), str(error).encode()]
        except Exception as error:
            logger.error("rank %s: %s fails: %s", self._rank, word.decode(), describe(error))
            return [ERROR, b"internal", type(error).__name__.encode()]

    def _do(self, word: bytes, arguments: list[bytes]) -> list[bytes]:
        match word:
            case b"build":
                transport, agent_name = (argument.decode() for argument in arguments)
                self._part = LocalPart(self._make(transport, agent_name))
                return [endpoint_frame(self._part.endpoint)]
            case b"open":
                groups = json.loads(arguments[1])
                pieces = [tuple(Piece(*run) for run in runs) for runs in groups]
                self._built.open(endpoint_of(arguments[0]), pieces)
                return []
            case b"ask":
                failpoints.hit("rank.asked", self._rank)
                return self._news()
            case _:
                self._built.shutdown()
                return []

    def _push(self, handle: bytes, agent: bytes, source: bytes, target: bytes, data: bytes) -> None:
        number, group = _HANDLE.unpack(handle)
        own, theirs = (np.frombuffer(each, np.int32) for each in (source, target))
        try:
            self._built.push(number, agent.decode(), own, theirs, data, group)
        except Exception as error:
            logger.warning("rank %s: a push failed: %s", self._rank, describe(error))
            self._failed.append((number, PushState.ERROR))

    def _news(self) -> list[bytes]:
        told = self._built.told()
        ended, self._failed = [*told.ended, *self._failed], []
        frames = [b"".join(_ENDED.pack(handle, state) for handle, state in ended)]
        for notification in told.notifications:
            frames += [notification.from_agent.encode(), notification.payload]
        return frames

    @property
    def _built(self) -> LocalPart:
        assert self._part is not None, "it is built"
        return self._part


def endpoint_frame(endpoint: Endpoint) -> bytes:
    """A rank's endpoint as bytes."""
    return json.dumps(asdict(endpoint) | {"metadata": endpoint.metadata.hex()}).encode()


def endpoint_of(frame: bytes) -> Endpoint:
    """The endpoint of these bytes. It has no ranks: it is that of one."""
    content = json.loads(frame)
    metadata = bytes.fromhex(content["metadata"])
    groups = tuple(
        PageGroup(*group)._replace(planes=tuple(group[-2]), bands=tuple(group[-1]))
        for group in content["groups"]
    )
    return Endpoint(**content | {"metadata": metadata, "groups": groups, "ranks": ()})
