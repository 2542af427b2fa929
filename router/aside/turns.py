"""Turns at something scarce: callers take turns, however much each of them asks for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Turns:
    """Admits `most` at a time. Who waits is admitted in turns by caller, and each caller's own in
    order. Belongs to an event loop."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncGenerator[None, None]:
        """Waits for a turn, which ends with the block."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, caller: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # It had come, and its caller had left.
            elif (left := self._waiting.get(caller)) is not None and turn in left:
                left.remove(turn)
                if not left:
                    del self._waiting[caller]
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            caller, own = self._waiting.popitem(last=False)
            turn = own.popleft()
            if own:
                self._waiting[caller] = own  # Behind all others.
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
