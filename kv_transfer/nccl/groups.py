"""The communicator of a channel: formed within bounded time, or not at all.

Life: made at both ends -> a first word goes through, which connects the two (NCCL connects nobody
before) -> FORMED. From then on it waits for work without a deadline.

A process may die between the rendezvous and that word. NCCL itself would wait for it for ever, and
nothing can stop that wait. So a thread of its own forms the communicator, and stays behind if the
time is up. It holds no staging buffer, and aborts the communicator if it comes back.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store

from kv_transfer.nccl.staging import Queue

SENDER, RECEIVER = 0, 1
"""Ranks of the two ends in their communicator."""

_NO_DEADLINE: Final = timedelta(days=365)
_LOOK_S: Final = 1e-3
"""So often it is looked whether both ends have joined; forming takes a second."""


def form_group(store: Store, rank: int, device: torch.device, within: timedelta) -> Any:
    """A communicator of the two ends that meet at `store`.

    Raises:
        TimeoutError: it was not formed within that time.
        RuntimeError: of the library.
    """
    formed: Future[Any] = Future()
    arguments = (formed, store, rank, device, within)
    threading.Thread(target=_form, args=arguments, name="kv-form", daemon=True).start()
    try:
        return formed.result(within.total_seconds())
    except TimeoutError:
        if formed.cancel():
            raise
        return formed.result()  # It came, or failed, just now.


def send(group: Any, pages: torch.Tensor) -> None:
    """Queues a send. Gloo does it."""
    _wait(group.send([pages], RECEIVER, 0), pages)


def receive(group: Any, pages: torch.Tensor) -> None:
    """Queues a receive. Gloo does it."""
    _wait(group.recv([pages], SENDER, 0), pages)


def abort_group(group: Any | None) -> None:
    """Ends all work that it has begun. A device that waits for the other end is let go."""
    if group is not None:
        with contextlib.suppress(Exception):
            group.abort()


def _form(
    formed: Future[Any], store: Store, rank: int, device: torch.device, within: timedelta
) -> None:
    until_s = time.monotonic() + within.total_seconds()
    group = None
    try:
        group = make_group(store, rank, device, within)
        _connect(group, rank, device, until_s)
        formed.set_result(group)
    except Exception as error:  # InvalidStateError: nobody waits for it any more.
        abort_group(group)
        with contextlib.suppress(InvalidStateError):
            formed.set_exception(error)


def make_group(store: Store, rank: int, device: torch.device, within: timedelta) -> Any:
    """A communicator that is not connected: NCCL between GPUs, Gloo between hosts' memories."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = distributed.ProcessGroupNCCL.Options()
        # Gathering and scattering fill a GPU: the wire's few blocks go first.
        options.is_high_priority_stream = True
        options._timeout = _NO_DEADLINE
        return distributed.ProcessGroupNCCL(store, rank, 2, options)
    return distributed.ProcessGroupGloo(store, rank, 2, within)


def _connect(group: Any, rank: int, device: torch.device, until_s: float) -> None:
    """Sends a word through it.

    Raises:
        TimeoutError: the other end did not take part.
    """
    queue = Queue(device)
    with queue():
        word = torch.zeros(1, device=device)
        one_way = group.send if rank == SENDER else group.recv
        one_way([word], RECEIVER if rank == SENDER else SENDER, 0).wait()
        through = queue.end()
    while through is not None and not through.query():
        if time.monotonic() > until_s:
            raise TimeoutError("the other end did not connect")
        time.sleep(_LOOK_S)


def _wait(work: Any, pages: torch.Tensor) -> None:
    """With NCCL the queue waits. With Gloo the thread does: its default is `within`."""
    if pages.is_cuda:
        work.wait()
    else:
        work.wait(_NO_DEADLINE)
