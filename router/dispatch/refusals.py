"""Errors for the client if no attempt begins or follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from baton.worker.v1 import worker_pb2
from router import errors
from router.placement import routing
from router.placement.models import adapter_changes
from router.workers.registry import DECODES, PREFILLS

if TYPE_CHECKING:
    from router.dispatch.fault import Fault
    from router.dispatch.job_run import ChoiceGroup
    from router.settings import LocalPrefill
    from router.workers.link import WorkerLink

_KV_POOL: Final = ", the size of the largest KV pool"


def error_of(group: ChoiceGroup, fault: Fault, max_workers_lost: int) -> errors.RouterError:
    """The error for the client when no attempt follows."""
    run = group.run
    if run.workers_lost >= max_workers_lost:
        return errors.poison_request(run.workers_lost, run.tokens_sent, started=run.started)
    match fault.reason:
        case worker_pb2.FAILURE_REASON_NUMERICAL:
            return errors.numerical_error()
        case worker_pb2.FAILURE_REASON_STRUCTURE:
            return errors.structure_too_complex(run.tokens_sent)
        case worker_pb2.FAILURE_REASON_NO_TOKEN:
            return errors.no_token_left(run.tokens_sent)
        case worker_pb2.FAILURE_REASON_HOOK:
            return errors.hook_failed(fault.hook)
        case worker_pb2.FAILURE_REASON_EXTENSION:
            return extension_refused(fault.hook)
        case worker_pb2.FAILURE_REASON_BEAMS:
            return beams_refused()
        case worker_pb2.FAILURE_REASON_ADAPTER if not run.started:
            name = run.job.model.called
            is_there = name in fault.worker.adapters  # Under way, another took its place.
            return adapter_changes(name) if is_there else errors.model_not_found(name)
        case worker_pb2.FAILURE_REASON_INTERNAL:
            return errors.internal()
        case worker_pb2.FAILURE_REASON_TOO_LARGE:
            job, room = run.job, fault.worker.capacity()
            limit_tokens = room.total_pages * job.model.page_size_tokens
            return errors.context_length_exceeded(
                job.prompt_tokens, job.stopping.max_tokens, limit_tokens, _KV_POOL
            )
    if run.started:
        lacks_adapter = fault.reason == worker_pb2.FAILURE_REASON_ADAPTER
        return errors.worker_lost_mid_stream(run.tokens_sent, lacks_adapter=lacks_adapter)
    match fault.reason:
        case None | worker_pb2.FAILURE_REASON_DRAINING:
            return errors.worker_lost(group.attempts)
        case worker_pb2.FAILURE_REASON_QUEUE_FULL:
            return errors.queue_full(0, retry_after_s=1.0)
        case _:
            return errors.kv_transfer_failed(group.attempts)


def extension_refused(hook: str) -> errors.RouterError:
    """The error for bytes that mean nothing to the hook that they are for."""
    field = f"input.extensions.{hook}"
    return errors.invalid_fields([errors.Violation(field, "means nothing to this hook")])


def beams_refused() -> errors.RouterError:
    """The error for a search where the layers are divided among stages."""
    why = "need workers of one stage (pp 1): the last stage alone knows which pages beams share"
    return errors.invalid_fields([errors.Violation("beams", why)])


def refusal(
    group: ChoiceGroup, workers: Sequence[WorkerLink], local: LocalPrefill, *, is_loading: bool
) -> errors.RouterError | None:
    """The error if none of the workers could run the group even with capacity; None if one
    could."""
    job = group.run.job
    limit_tokens = routing.largest_pool_tokens(group.demand, workers, local)
    if limit_tokens is None:
        return _nobody(group, workers, local, is_loading=is_loading)
    max_tokens = job.stopping.max_tokens
    if job.prompt_tokens + max_tokens > limit_tokens:
        return errors.context_length_exceeded(job.prompt_tokens, max_tokens, limit_tokens, _KV_POOL)
    return None


def _nobody(
    group: ChoiceGroup, workers: Sequence[WorkerLink], local: LocalPrefill, *, is_loading: bool
) -> errors.RouterError:
    wanted = group.run.job.model
    model = wanted.name
    named = [worker for worker in workers if worker.identity.model.name == model]
    if wanted.digest and not group.run.started:
        if not any(wanted.called in worker.adapters for worker in named):
            if not any(worker.serves(wanted) for worker in named):
                return errors.model_not_found(wanted.called)
        elif routing.can_run(named, local):
            return adapter_changes(wanted.called)
    if group.attempts:
        return errors.worker_lost(group.attempts)
    if is_loading:
        return errors.model_loading(model)
    named = [worker for worker in named if not worker.is_doubted]
    if any(worker.draining for worker in named):
        return errors.workers_draining(model)
    roles = {worker.identity.role for worker in named}
    if roles & PREFILLS and roles & DECODES:
        return errors.workers_differ(model)
    missing = "" if not roles else "decode" if roles & PREFILLS else "prefill"
    return errors.no_workers(model, missing=missing)
