"""Pages moved by NIXL over UCX: RDMA, CUDA IPC, shared memory or TCP, whichever is best.

Facts that shape this file, measured on NIXL 1.5.1:

- Each group of the pool is one descriptor list of pages at a constant stride, prepared once for
  each side; a push names pages by index. Pieces of each page are such a list, too, one piece of all
  pages behind the other. Posting costs
  2-70 us that way, and NIXL merges adjacent pages itself; merging here and preparing a list per
  push cost ten times as much and moved no more bytes.
- A notification that rides on a push is sent when the pushing side sees the push complete, so
  handles must be polled.
- The progress thread's `pthrDelay` is how long it sleeps when nothing happens; events wake it. The
  Python wrapper fixes it at 0, which spins: a whole core a process, idle or not. Therefore this
  file speaks to the bindings below that wrapper.
- UCX keeps what it has mapped of a peer's GPU memory until this process ends, also when the peer's
  process has ended long ago: a killed worker's pool stays allocated, and its successor finds no
  room (github.com/openucx/ucx/issues/11753). Without that cache the memory is free 0.03 s after the
  kill, and pushes are as fast: 258 GB/s either way, 2 MiB pages over NVLink. So it is off here.
- Between host memory and a GPU of another process UCX goes by the network card or TCP, also on one
  host: 1.8 GB/s (not measured here, github.com/ai-dynamo/nixl/issues/791). So only pages of the
  pool are pushed.
- Releasing a handle in progress returns at once and stops nothing. Only handles that are DONE are
  released here.
"""

from __future__ import annotations

import importlib
import logging
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kv_transfer.transports.pool import PoolMemory, check_pages, check_payload, pieces_between
from kv_transfer.types import (
    MAX_PART_BYTES,
    Endpoint,
    Notification,
    PageIds,
    Pieces,
    PushState,
    TransportError,
)

logger = logging.getLogger(__name__)

PROGRESS_SLEEP_US = 100_000
_METADATA_HEADER = struct.Struct("<4s16sQ")
_METADATA_MAGIC = b"BTN1"
_STAGED_TCP = {"tcp", "self", "cuda_copy", "gdr_copy"}
"""Names in UCX_TLS that leave nothing but TCP between two processes, pages of GPUs going through
host memory."""
_GPU_TO_GPU = {"cuda", "cuda_ipc"}
_SHARED_MEMORY = {"sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem"}


_Runs = tuple[tuple[int, int], ...]
"""Offset and bytes of pieces of a page."""


@dataclass(slots=True, eq=False)
class _Peer:
    endpoint: Endpoint
    path: str
    pages: Sequence[int | None]
    """Handles of the prepared lists of the peer's pages, by group; None: nothing is written
    there."""
    own: Sequence[int | None]
    """Handles of this process's own pools."""
    pieces: Sequence[int]
    """How many pieces of each page a push writes, by group."""
    pushes: int = 0
    """In progress."""
    is_closing: bool = False


class NixlTransport:
    """See the module."""

    name = "nixl"
    moves_pieces = True

    def __init__(self, agent_name: str, pool: PoolMemory) -> None:
        self._nixl = _bindings()
        pool.check_plain()
        _check_environment()
        if pool.memory == "VRAM":
            os.environ.setdefault("UCX_CUDA_IPC_CACHE", "n")
            torch.cuda.set_device(pool.device_id)
        self._pool = pool
        self._peers: dict[str, _Peer] = {}
        self._pushes: dict[int, _Peer] = {}
        self._broken: list[int] = []
        try:
            self._agent = self._new_agent(agent_name)
            self._region = self._register()
            self._own_lists: dict[tuple[int, _Runs], int] = {}
            """Prepared lists of this process, by group, and offset and bytes of each piece."""
            for group, pages in enumerate(pool.groups):
                self._own_list(group, ((0, pages.page_bytes),))
            metadata = _host_header() + self._agent.getLocalMD()
        except Exception as error:
            raise TransportError("nixl_failed", f"{type(error).__name__}{_set_here()}") from error
        self._endpoint = pool.endpoint(agent_name, self.name, metadata)

    @property
    def endpoint(self) -> Endpoint:
        """See `KvTransport`."""
        return self._endpoint

    def open(self, peer: Endpoint, pieces: Sequence[Pieces] | None = None) -> None:
        """See `PieceTransport`."""
        known = self._peers.get(peer.agent_name)
        if known is not None:
            if known.endpoint != peer:
                raise TransportError("peer_busy", "pushes to its predecessor are in progress")
            known.is_closing = False
            return
        pieces = pieces_between(self._endpoint, peer, pieces)
        path = self._path_to(peer)
        try:
            self._agent.loadRemoteMD(peer.metadata[_METADATA_HEADER.size :])
            self._agent.makeConnection(peer.agent_name, [])
            name = peer.agent_name
            theirs = [
                self._prepare(name, peer, group, _runs_of(runs, 1)) if runs else None
                for group, runs in enumerate(pieces)
            ]
            own = [
                self._own_list(group, _runs_of(runs, 0)) if runs else None
                for group, runs in enumerate(pieces)
            ]
        except Exception as error:
            raise TransportError("unreachable", type(error).__name__) from error
        self._peers[peer.agent_name] = _Peer(peer, path, theirs, own, list(map(len, pieces)))

    def path(self, agent_name: str) -> str:
        """See `KvTransport`. Inferred from what both sides can do: NIXL does not say."""
        return self._peers[agent_name].path

    def push(
        self, agent_name: str, source: PageIds, target: PageIds, payload: bytes, group: int = 0
    ) -> int:
        """See `KvTransport`."""
        check_payload(payload, MAX_PART_BYTES)
        peer = self._open_peer(agent_name)
        lists = peer.own[group], peer.pages[group]
        if (count := peer.pieces[group]) > 1:
            sizes = self._pool.groups[group].num_pages, peer.endpoint.groups[group].num_pages
            check_pages(source, sizes[0], target, sizes[1])  # Beyond one piece lies the next.
            source, target = (
                _in_all_pieces(pages, count, size)
                for pages, size in zip((source, target), sizes, strict=True)
            )
        handle = self._make_push(lists, source, target, payload)
        self._pushes[handle] = peer
        peer.pushes += 1
        try:
            self._agent.postXferReq(handle, b"")
        except Exception as error:
            # Part of it may be under way: an error to be polled, not one to be raised.
            logger.warning("a post failed: %s", type(error).__name__)
            self._broken.append(handle)
        return handle

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `KvTransport`."""
        check_payload(payload, MAX_PART_BYTES)
        self._open_peer(agent_name)
        try:
            self._agent.genNotif(agent_name, payload, [])
        except self._nixl.nixlRemoteDisconnectError as error:
            raise TransportError("disconnected", type(error).__name__) from error
        except Exception as error:
            raise TransportError("notify_failed", type(error).__name__) from error

    def poll_pushes(self) -> list[tuple[int, PushState]]:
        """See `KvTransport`."""
        ended: list[tuple[int, PushState]] = []
        for handle, peer in list(self._pushes.items()):
            state = self._state(handle)
            if state is PushState.IN_PROGRESS:
                continue
            del self._pushes[handle]
            ended.append((handle, state))
            self._let_go(handle, state, peer)
        return ended

    def poll_notifications(self) -> list[Notification]:
        """See `KvTransport`."""
        received = self._agent.getNotifs({}, [])
        if not received:
            return []
        return [
            Notification(peer, data) for peer, all_data in received.items() for data in all_data
        ]

    def close(self, agent_name: str) -> None:
        """See `KvTransport`. What NIXL holds of the peer stays until its pushes have ended, and a
        socket (two where all goes over TCP, NIXL 1.5.1) for as long as this process lives."""
        peer = self._peers.get(agent_name)
        if peer is None:
            return
        peer.is_closing = True
        if not peer.pushes:
            self._forget(peer)

    def shutdown(self) -> None:
        """See `KvTransport`."""
        if self._pushes:
            logger.warning("%d pushes are still in progress: nothing released", len(self._pushes))
            _abandoned.append(self)
            return
        for peer in list(self._peers.values()):
            self._forget(peer)
        for prepared in self._own_lists.values():
            self._agent.releasedDlistH(prepared)
        self._agent.deregisterMem(self._region, [])
        del self._agent

    def _new_agent(self, agent_name: str) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_SLEEP_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        agent = self._nixl.nixlAgent(agent_name, config)
        agent.createBackend("UCX", {})
        return agent

    def _register(self) -> Any:
        pool = self._pool
        run = (pool.base_address, pool.size, pool.device_id, "")
        region = self._nixl.nixlRegDList(self._segment(pool.memory), [run])
        self._agent.registerMem(region, [])
        return region

    def _own_list(self, group: int, runs: _Runs) -> int:
        """Prepares pieces of each page of a group of this process, once."""
        if (known := self._own_lists.get((group, runs))) is not None:
            return known
        pages = self._prepare(self._nixl.NIXL_INIT_AGENT, self._pool, group, runs)
        self._own_lists[group, runs] = pages
        return pages

    def _prepare(
        self, agent_name: str, pool: PoolMemory | Endpoint, group: int, runs: _Runs
    ) -> int:
        pages = pool.groups[group]
        address, every = pool.base_address + pages.offset, (pages.page_bytes, pages.num_pages)
        strided = [[address + offset, size, pool.device_id, *every] for offset, size in runs]
        descriptors = np.array(strided, dtype=np.uint64)
        segment = self._segment(pool.memory)
        prepared: int = self._agent.prepXferDlist(agent_name, segment, descriptors, [])
        return prepared

    def _segment(self, memory: str) -> Any:
        return self._nixl.VRAM_SEG if memory == "VRAM" else self._nixl.DRAM_SEG

    def _make_push(
        self,
        lists: tuple[int | None, int | None],
        source: PageIds,
        target: PageIds,
        payload: bytes,
    ) -> int:
        own, theirs = lists
        if own is None or theirs is None:
            raise TransportError("bad_pages", "nothing is written to this peer")
        try:
            handle: int = self._agent.makeXferReq(
                self._nixl.NIXL_WRITE, own, source, theirs, target, payload, [], False
            )
        except self._nixl.nixlInvalidParamError as error:
            raise TransportError("bad_pages", "page ids outside of the pool") from error
        except Exception as error:
            raise TransportError("push_failed", type(error).__name__) from error
        return handle

    def _state(self, handle: int) -> PushState:
        if handle in self._broken:
            self._broken.remove(handle)
            return PushState.ERROR
        try:
            status = self._agent.getXferStatus(handle)
        except Exception as error:
            logger.warning("a push failed: %s", type(error).__name__)
            return PushState.ERROR
        if status == self._nixl.NIXL_SUCCESS:
            return PushState.DONE
        return PushState.IN_PROGRESS if status == self._nixl.NIXL_IN_PROG else PushState.ERROR

    def _let_go(self, handle: int, state: PushState, peer: _Peer) -> None:
        """A push has ended, which is reported whatever becomes of what it held."""
        peer.pushes -= 1
        if state is PushState.DONE:
            self._release(self._agent.releaseXferReq, handle)
        if peer.is_closing and not peer.pushes:
            self._release(self._forget, peer)

    @staticmethod
    def _release(what: Callable[[Any], object], held: object) -> None:
        try:
            what(held)
        except Exception as error:
            logger.warning("a push that ended was not released: %s", type(error).__name__)

    def _open_peer(self, agent_name: str) -> _Peer:
        peer = self._peers.get(agent_name)
        if peer is None or peer.is_closing:
            raise TransportError("disconnected", "the peer is not open")
        return peer

    def _forget(self, peer: _Peer) -> None:
        del self._peers[peer.endpoint.agent_name]
        for pages in peer.pages:
            if pages is not None:
                self._agent.releasedDlistH(pages)
        try:
            self._agent.invalidateRemoteMD(peer.endpoint.agent_name)
        except self._nixl.nixlNotFoundError:
            logger.debug("the agent had forgotten the peer already")

    def _path_to(self, peer: Endpoint) -> str:
        header = peer.metadata[: _METADATA_HEADER.size]
        if len(header) < _METADATA_HEADER.size or header[:4] != _METADATA_MAGIC:
            raise TransportError("unreachable", "not the metadata of this transport")
        on_gpus = peer.memory == "VRAM" and self._pool.memory == "VRAM"
        return path_name(os.environ.get("UCX_TLS", "all"), header == _host_header(), on_gpus)


def _runs_of(pieces: Pieces, side: int) -> _Runs:
    """Offset and bytes of each piece, in the writer's page (0) or in the target's (1)."""
    return tuple((piece[side], piece.size) for piece in pieces)


def _in_all_pieces(pages: PageIds, count: int, num_pages: int) -> PageIds:
    """The places of pages in a list of so many pieces of `num_pages` pages each."""
    firsts = np.arange(count, dtype=np.int32)[:, None] * np.int32(num_pages)
    places: PageIds = (firsts + pages).reshape(-1)
    return places


_abandoned: list[NixlTransport] = []
"""Transports given up with pushes in progress: their memory must outlive those."""


def _bindings() -> Any:
    try:
        return importlib.import_module("nixl_cu13._bindings")
    except ImportError as error:
        raise TransportError("nixl_missing", "install nixl-cu13, or choose loopback") from error


def _set_here() -> str:
    """Variables of UCX, which may be those of another program; empty: there are none."""
    found = sorted(f"{name}={of}" for name, of in os.environ.items() if name.startswith("UCX_"))
    return f"; UCX's own lines say more, and set here are {', '.join(found)}" if found else ""


def _check_environment() -> None:
    allowed = os.environ.get("UCX_TLS", "all")
    if allowed != "all" and not allowed.startswith("^") and "tcp" not in allowed.split(","):
        logger.warning("UCX_TLS=%s leaves out tcp, which UCX wires peers up with", allowed)


def path_name(allowed: str, same_host: bool, on_gpus: bool) -> str:
    """The way that UCX takes, as far as it can be told from `allowed`, a value of UCX_TLS."""
    names = set(allowed.split(","))
    anything = allowed == "all" or allowed.startswith("^")
    if not anything and names <= _STAGED_TCP:
        return "nixl/tcp"
    direct, transports = ("cuda_ipc", _GPU_TO_GPU) if on_gpus else ("shm", _SHARED_MEMORY)
    if same_host and (anything or names & transports):
        return f"nixl/{direct}"
    return "nixl/net"


def _host_header() -> bytes:
    """Header of the metadata: equal for two processes that can share memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = bytes.fromhex(file.read().strip().replace("-", ""))
        ipc_namespace = os.stat("/proc/self/ns/ipc").st_ino
    except (OSError, ValueError):
        boot_id, ipc_namespace = bytes(16), os.getpid()
    return _METADATA_HEADER.pack(_METADATA_MAGIC, boot_id, ipc_namespace)
