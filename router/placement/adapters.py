"""The time until a worker has a request's adapter in a slot, where a step can use it.

A worker says which adapters are in slots, and which only in host memory or in files
(`AdapterPlaces` of its load report). The adapter of a leg that this router has open there is in a
slot or comes there, too: so a burst of requests goes where its first one went.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prefixes.keys import short_key

if TYPE_CHECKING:
    from router.workers.link import WorkerLink

COPY_BYTES_PER_S: Final = 20e9
"""Into a slot from host memory, where the worker has not measured such copies: PCIe 4 has 25. Not
tuned: any rate prefers workers whose adapter is in a slot, by milliseconds."""
READ_BYTES_PER_S: Final = 1e9
"""From a file: a plain disk. Not tuned."""
UNKNOWN_WAIT_S: Final = 1.0
"""For a slot that another adapter leaves, where no request has waited lately. Not tuned: an answer
of a few dozen tokens takes as long."""


def is_in_slot(worker: WorkerLink, digest: bytes) -> bool:
    """Whether a slot has an adapter, or will. Of workers that do not say so all have."""
    estimate = worker.estimate
    if (slots := estimate.in_slots) is None or short_key(digest) in slots:
        return True
    return digest in estimate.adapters


def finds_slot(worker: WorkerLink, digest: bytes) -> bool:
    """Whether a request with an adapter would wait for no other adapter to leave its slot."""
    if is_in_slot(worker, digest):
        return True
    estimate = worker.estimate
    slots = estimate.in_slots or ()
    coming = sum(short_key(each) not in slots for each in estimate.adapters)
    return estimate.load.adapters.idle_slots > coming


def slot_s(worker: WorkerLink, digest: bytes) -> float:
    """Seconds until a slot of a worker has an adapter; 0: one has it."""
    if is_in_slot(worker, digest):
        return 0.0
    size, places = worker.adapter_bytes.get(digest, 0), worker.estimate.load.adapters
    seconds = size / (worker.capacity().load_bytes_per_s or COPY_BYTES_PER_S)
    if not places.all_in_host and short_key(digest) not in places.in_host:
        seconds += size / READ_BYTES_PER_S
    if not finds_slot(worker, digest):
        seconds += places.wait_ms / 1e3 or UNKNOWN_WAIT_S
    return seconds
