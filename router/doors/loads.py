"""What a router shows of its load: in metrics, and to what balances routers."""

from __future__ import annotations

from router.dispatch.dispatcher import JobDispatcher
from router.workers.registry import Registry
from telemetry.metrics.endpoint import EndpointLoad
from telemetry.metrics.router import RouterLoad, WorkerUp


def load_of(dispatcher: JobDispatcher, registry: Registry, running_batches: int) -> RouterLoad:
    """The present load of the router itself."""
    return RouterLoad(
        inflight_requests=dispatcher.active_jobs,
        queued_requests=dispatcher.queued_jobs,
        queued_tokens=dispatcher.queued_tokens,
        queue_drain_s=dispatcher.queue_drain_s(),
        workers=[
            WorkerUp(link.worker_id, link.role, link.identity.model.name)
            for link in registry.members
        ],
        running_batches=running_batches,
    )


def endpoint_load_of(dispatcher: JobDispatcher, registry: Registry) -> EndpointLoad:
    """The present load of the router with its workers."""
    decoding = [link for link in registry.members if link.decodes]
    loads = [link.estimate.load for link in decoding]
    total = sum(load.total_pages for load in loads)
    waiting = dispatcher.waiting_jobs
    return EndpointLoad(
        waiting=waiting,
        running=max(0, dispatcher.active_jobs - waiting),
        used_pages=total - sum(load.free_pages + load.evictable_pages for load in loads),
        total_pages=total,
        page_tokens=decoding[0].identity.model.page_size_tokens if decoding else 0,
    )
