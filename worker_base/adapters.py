"""The adapters of a worker: routers hear of them, and pass on what operators want of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from baton.worker.v1 import worker_pb2
from engine.adapters.types import AdapterError

if TYPE_CHECKING:
    from engine.adapters.registry import Adapters
    from worker_base.outbox import Outbox

logger = logging.getLogger(__name__)

NO_FOLDER = "this worker loads no adapters while it runs: start it with adapters_dir"


class AdapterService:
    """See the module. Belongs to the event loop; files are read on a thread, one at a time.

    Args:
        adapters: the engine's.
        folder: adapters are loaded from below it alone; empty: none is loaded while it runs.
        send: sends a message to every router.
    """

    def __init__(
        self,
        adapters: Adapters,
        folder: str,
        send: Callable[[worker_pb2.WorkResponse], None],
    ) -> None:
        self._adapters = adapters
        self._folder = folder
        self._send = send
        self._turns = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def message(self) -> worker_pb2.WorkResponse | None:
        """What a router hears of the adapters that there are; None: the worker takes none."""
        if not self._adapters.on:
            return None
        named = [
            worker_pb2.Adapter(name=info.name, digest=info.digest, num_bytes=info.num_bytes)
            for info in self._adapters.named()
        ]
        return worker_pb2.WorkResponse(adapters=worker_pb2.Adapters(adapters=named))

    def report(self) -> None:
        """Every router hears of the adapters that there are now."""
        if (message := self.message()) is not None:
            self._send(message)

    def load(self, asked: worker_pb2.LoadAdapter, outbox: Outbox) -> None:
        """Loads one, and answers."""

        async def work() -> bytes:
            return await asyncio.to_thread(self._read, asked.name, asked.path, again=asked.again)

        self._begin(asked.call_id, work, outbox)

    def _read(self, name: str, path: str, *, again: bool) -> bytes:
        """Returns the digest. Runs on a thread."""
        found, within = below(self._folder, path)
        return self._adapters.load(name, found, again=again, within=within).digest

    def unload(self, asked: worker_pb2.UnloadAdapter, outbox: Outbox) -> None:
        """Forgets one, and answers."""

        async def work() -> bytes:
            if not self._adapters.unload(asked.name):
                raise AdapterError(f"there is no adapter {asked.name!r}")
            return b""

        self._begin(asked.call_id, work, outbox)

    def _begin(self, call_id: bytes, work: Callable[[], Awaitable[bytes]], outbox: Outbox) -> None:
        task = asyncio.create_task(self._run(call_id, work, outbox))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self, call_id: bytes, work: Callable[[], Awaitable[bytes]], outbox: Outbox
    ) -> None:
        done = worker_pb2.AdapterDone(call_id=call_id)
        try:
            async with self._turns:
                done.digest = await work()
        except AdapterError as error:
            done.error = str(error)
        except Exception:
            logger.exception("a command about an adapter failed")
            done.error = "it failed: the worker's log has the cause"
        else:
            self.report()
        outbox.send(worker_pb2.WorkResponse(adapter_done=done))


def below(folder: str, path: str) -> tuple[Path, Path]:
    """A path in a folder, and nowhere else, whatever links lead to; and the folder. Neither path
    has links.

    Raises:
        AdapterError: it is not there, or nothing may be loaded.
    """
    if not folder:
        raise AdapterError(NO_FOLDER)
    root = Path(folder).resolve()
    found = (root / path).resolve()
    if not found.is_relative_to(root):
        raise AdapterError(f"{path!r} lies outside of adapters_dir")
    if found == root or not found.is_dir():
        raise AdapterError(f"{path!r} is no folder below adapters_dir")
    if not all(each.resolve().is_relative_to(root) for each in found.iterdir()):
        raise AdapterError(f"a file of {path!r} lies outside of adapters_dir")
    return found, root
