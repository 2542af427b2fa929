"""Makes the parts of an LLM: a worker's engine, and a router's doors in front of it."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress
from dataclasses import replace

import torch

from baton.client.clients import LONGEST_S
from engine.bounds import UNBOUNDED
from engine.config import EngineConfig
from engine.engine import Engine
from local.engine_dispatcher import EngineDispatcher
from router.doors.frontdoor import InferenceService
from router.doors.openai.inside import Inside
from router.events import NO_EVENTS
from router.requests.bounds import BodyShape
from router.requests.tokenization import Tokenizers
from router.requests.validation import Limits
from serving.gpu_slots import claimed_for
from serving.output import model_progress
from worker.engine_config import engine_config
from worker.loading import loading_progress, terminal
from worker.settings import WorkerSettings, with_model_found


def build(settings: WorkerSettings, stack: ExitStack) -> Engine:
    """Builds the engine without starting it. Resources that must outlive it go onto the stack."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    with model_progress() as fetching:
        settings = with_model_found(settings, fetching)
    stack.enter_context(
        claimed_for(settings.device, settings.gpu_slots_dir, settings.name, settings.ranks)
    )
    with loading_progress(terminal(settings.log_format)) as loading:
        return Engine.build(local_config(settings), loading)


def local_config(settings: WorkerSettings) -> EngineConfig:
    """The engine's configuration. A batch has no stream that waits, so prompts beside its rows are
    computed in large steps, unless the settings say otherwise."""
    config = engine_config(settings)
    mixed = settings.debug.mixed_prefill_tokens or UNBOUNDED
    return replace(config, mixed_prefill_tokens=mixed)


async def open_doors(
    engine: Engine, settings: WorkerSettings, stack: ExitStack
) -> tuple[InferenceService, Inside]:
    """Starts the engine and its front doors on the running loop."""
    tokenizers = Tokenizers()
    stack.callback(tokenizers.close)
    dispatcher = EngineDispatcher(engine, settings.max_sequences)
    dispatcher.start()
    stack.callback(engine.stop)
    if settings.debug.profile:
        engine.profile(settings.debug.profile, settings.debug.profile_dir)
    with suppress(Exception):  # The requests that need it report it.
        await tokenizers.get(engine.model.path)
    limits = Limits(
        max_choices=min(Limits().max_choices, settings.max_sequences),
        max_request_duration_s=LONGEST_S,
        max_unread_tokens=sys.maxsize,
    )
    service = InferenceService(dispatcher, tokenizers, limits)
    shape = BodyShape(dispatcher.models)
    return service, Inside(dispatcher, tokenizers, limits, NO_EVENTS, shape)
