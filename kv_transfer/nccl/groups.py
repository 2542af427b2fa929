"""The communicators of a lane: formed within bounded time, or not at all.

Life of one: made at both ends -> a first word goes through, which connects the two (NCCL connects
nobody before) -> FORMED; from then on it waits for work without a deadline.

Who dies between the rendezvous and that word is waited for no longer than asked. NCCL itself would
wait for ever, and nothing breaks it off: a thread that is inside it then stays behind. It holds no
staging buffer, and ends what it has formed if it comes back.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from kv_transfer.nccl.staging import Queue

SENDER, RECEIVER = 0, 1

_NO_DEADLINE: Final = timedelta(days=365)
_LOOK_S: Final = 1e-3


def form_groups(
    store: Store, rank: int, device: torch.device, count: int, within: timedelta
) -> list[Any]:
    """As many communicators of the two ends that meet at `store`.

    Raises:
        TimeoutError: they were not formed within that time.
        RuntimeError: of the library.
    """
    formed: Future[list[Any]] = Future()
    arguments = (formed, store, rank, device, count, within)
    threading.Thread(target=_form, args=arguments, name="kv-form", daemon=True).start()
    try:
        return formed.result(within.total_seconds())
    except TimeoutError:
        if formed.cancel():
            raise
        return formed.result()  # It came, or failed, just now.


def send(group: Any, pages: torch.Tensor) -> None:
    """Queues a send, or does it."""
    _wait(group.send([pages], RECEIVER, 0), pages)


def receive(group: Any, pages: torch.Tensor) -> None:
    """Queues a receive, or does it."""
    _wait(group.recv([pages], SENDER, 0), pages)


def abort_groups(groups: Iterable[Any]) -> None:
    """Ends what is on their way; a device that waits for the other end is let go."""
    for group in groups:
        with contextlib.suppress(Exception):
            group.abort()


def _form(
    formed: Future[list[Any]],
    store: Store,
    rank: int,
    device: torch.device,
    count: int,
    within: timedelta,
) -> None:
    until_s = time.monotonic() + within.total_seconds()
    groups: list[Any] = []
    try:
        for name in map(str, range(count)):
            groups.append(form_group(PrefixStore(name, store), rank, device, within))
            _connect(groups[-1], rank, device, until_s)
        formed.set_result(groups)
    except Exception as error:  # InvalidStateError: nobody waits for them any more.
        abort_groups(groups)
        with contextlib.suppress(InvalidStateError):
            formed.set_exception(error)


def form_group(store: Store, rank: int, device: torch.device, within: timedelta) -> Any:
    """A communicator of two: NCCL between GPUs, Gloo between hosts' memories."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options = distributed.ProcessGroupNCCL.Options()
        # Gathering and scattering fill a GPU: the wire's few blocks go first.
        options.is_high_priority_stream = True
        options._timeout = _NO_DEADLINE
        return distributed.ProcessGroupNCCL(store, rank, 2, options)
    return distributed.ProcessGroupGloo(store, rank, 2, within)


def _connect(group: Any, rank: int, device: torch.device, until_s: float) -> None:
    """A word through it. Raises TimeoutError."""
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
    """In NCCL's case the queue waits; Gloo's default is how long forming may take."""
    if pages.is_cuda:
        work.wait()
    else:
        work.wait(_NO_DEADLINE)
