"""The engine: model, pool, scheduler and step loop behind one thread-safe interface."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path

import torch

from engine.adapters.registry import Adapters
from engine.adapters.types import Adapter
from engine.bounds import PromptLimits
from engine.checkpoints import CheckpointError, SamplingDefaults, Weights, sampling_defaults
from engine.config import EngineConfig
from engine.expert_groups.ranks import GroupedRanks
from engine.groups.spec import Full, State
from engine.hosts.others import OtherHosts
from engine.loop.fetch_port import FetchPort
from engine.loop.late import Delivery
from engine.loop.profiling import StepProfiler
from engine.loop.step_loop import OnLost, OnStep, StepLoop
from engine.masks.matchers import Matchers
from engine.model import LoadedModel, ModelError
from engine.model.shard import Shard
from engine.pages.prefix import ReportPages, report_pages
from engine.pages.watch import CacheEvent, CacheEvents
from engine.parts.adapters import adapters_of
from engine.parts.building import (
    Progress,
    build_executor,
    load,
    open_all,
    pages_that_fit,
    widths_of,
)
from engine.parts.defaults import check_memory, on_device, use_device, with_defaults
from engine.parts.paging import EngineError as EngineError
from engine.parts.paging import NotNowError as NotNowError
from engine.parts.paging import make_pages, resolved
from engine.parts.scheduling import late_rows_of, scheduler_of
from engine.pool.pools import KvPools
from engine.pooling.requests import Floats
from engine.ranks.keeper import Pulse, RankError
from engine.ranks.leader import HostRanks
from engine.ranks.ranks import NoRanks, Ranks
from engine.sampling import Sampler
from engine.schedule.scheduler import Scheduler
from engine.step.hooks import Hook
from engine.tiers.build import StoreConfig
from engine.types import (
    EngineLoad,
    FailureReason,
    ModelInfo,
    Request,
    RequestFailed,
    Sink,
    TokenRecord,
)
from prefixes.index import POOL

log = logging.getLogger("baton.engine")


class Engine:
    """Runs requests. Every method may be called from any thread, and none waits for a step.

    The events of a request go to the sink that it was submitted with (`engine.types`).
    """

    def __init__(
        self,
        model: ModelInfo,
        pools: KvPools,
        loop: StepLoop,
        matchers: Matchers | None = None,
        ranks: Ranks | None = None,
        step_timeout_s: float = math.inf,
        score_head: Floats | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.adapters = adapters or Adapters()
        """Adapters that requests may name."""
        self._score_head = score_head
        self._step_timeout_s = step_timeout_s
        self.model = model
        self.pools = pools
        """Rank 0's part of the pages of all groups."""
        self.pool = pools.first
        """Rank 0's part of the pages of group 0."""
        self.ranks = ranks or NoRanks()
        self.fetching = FetchPort(loop)
        """For whoever moves pages between workers."""
        self._loop = loop
        self._matchers = matchers or Matchers(model.path, model.vocab_size, model.eos_token_ids)

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        beside: str = "",
        hosts: OtherHosts | None = None,
    ) -> Engine:
        """Loads the model and allocates the pool. Blocks until that is done.

        Args:
            config: the engine's configuration.
            progress: hears of the parts that are done.
            beside: what each other rank runs beside its steps; see `HostRanks`.
            hosts: the agents of other hosts, for `config.nodes` above 1.

        Raises:
            EngineError: the configuration does not fit the model or the device.
        """
        config = with_defaults(config)
        if config.nodes > 1 and hosts is None:
            raise EngineError(
                f"nodes {config.nodes} need `baton worker` on each host: an engine alone has no"
                " agents there"
            )
        hooks, ranks = open_all(config), _ranks(config, beside, hosts)
        try:
            with on_device(torch.device(config.device)):
                return cls._build(config, ranks, hooks, progress)
        except Exception as error:
            # A device that lost ranks have let go of may have an error of its own.
            reason = str(error) if isinstance(error, RankError) else ranks.lost
            ranks.close()
            if not reason:
                raise
            raise NotNowError(reason) from error
        except BaseException:
            ranks.close()
            raise

    @classmethod
    def _build(
        cls,
        config: EngineConfig,
        ranks: Ranks,
        hooks: Sequence[Hook],
        progress: Progress | None,
    ) -> Engine:
        device = torch.device(config.device)

        def check(weights: Weights) -> None:
            """Starts the other ranks once nothing is wrong with the configuration."""
            check_memory(config, weights, device)
            ranks.start()

        def pass_on(phase: str, done: int, total: int) -> None:
            ranks.check()
            if progress:
                progress(phase, done, total)

        others = ranks.collective, ranks.stages
        moves = ranks.dispatch
        loaded = load(config, device, *others, dispatch=moves, check=check, progress=pass_on)
        ranks.count(loaded.model.pairs)
        num_pages = ranks.agree(loaded.revision, pages_that_fit(config, loaded, device, hooks))
        pools = make_pages(num_pages, config, loaded, device)
        config = resolved(config, loaded, pools.first)
        info = _model_info(config, loaded, pools, hooks)
        sampler = Sampler(config.max_sequences, info.vocab_size, device, info.eos_token_ids)
        ranks.join()
        try:
            own = build_executor(config, loaded, pools, sampler, hooks, pass_on)
        except EngineError:
            ranks.check()  # What a rank that is gone has sent has no meaning.
            raise
        executor = ranks.executor(own)
        ranks.wait_until_ready()
        profiler = StepProfiler(nvtx=device.type == "cuda")
        shards = [Shard(rank, config.tp) for rank in range(config.tp)]
        heads = [[shard.shared(spec.units) for shard in shards] for spec in pools.specs]
        stores = StoreConfig(
            config.kv_stores, config.kv_secret_file, info.fingerprint, heads, ranks.memories
        )
        mover = ranks.mover if config.ranks > 1 else None
        widths, adapters = widths_of(config, own), adapters_of(config, loaded)
        scheduler = scheduler_of(config, pools, sampler, hooks, stores, mover, widths, adapters)
        loop = StepLoop(scheduler, executor, profiler, late_rows_of(config, own.late, pools))
        timeout_s, head = config.step_timeout_s, loaded.score_head
        return cls(info, pools, loop, None, ranks, timeout_s, head, adapters)

    @property
    def max_step_tokens(self) -> int:
        """Most new tokens in a step: the chunk of a long prompt."""
        return self._loop.max_step_tokens

    def limit_prompts(self, limits: PromptLimits) -> None:
        """Limits the prompts of steps from the next plan on."""
        self._loop.limit_prompts(limits)

    def start(self, on_step: OnStep | None = None, on_lost: OnLost | None = None) -> None:
        """Starts the step loop.

        Args:
            on_step: called once per settled step with its seconds and the number of sequences that
                it decoded, on the loop's thread. It must return at once.
            on_lost: called on that thread when no step will run any more: the device or a rank is
                lost, or the loop failed.
        """
        device = self.pool.device
        self._loop.post(lambda _: use_device(device))
        self._loop.start(on_step, on_lost)
        self.ranks.call_when_lost(lambda _: self._loop.lose())
        self.ranks.watch(self._pulse)

    def _pulse(self) -> Pulse:
        load = self._loop.load
        return Pulse(load.progress, self._step_timeout_s + load.long_step_ms / 1e3)

    def stop(self) -> None:
        """Stops the step loop. Remaining requests are dropped without an event."""
        self._loop.stop()
        self.ranks.close()
        self._matchers.close()

    @property
    def lost(self) -> str:
        """Which rank is lost, and why; empty: none is. Then no step runs any more."""
        return self.ranks.lost

    def submit(self, request: Request, sink: Sink) -> None:
        """Accepts a request. A request that cannot run gets RequestFailed."""
        if request.pooling is not None and request.pooling.scores:
            if self._score_head is None:
                failed = RequestFailed(request.id, FailureReason.INTERNAL)
                self._loop.post(lambda scheduler: scheduler.requests.emit(sink, failed))
                return
            pooling = replace(request.pooling, head=self._score_head)
            request = replace(request, pooling=pooling)
        adapter = self.adapters.hold(request.adapter) if request.adapter else None
        try:
            self._submit(request, sink, adapter)
        except BaseException:  # The scheduler has not heard of it, so nobody else lets it go.
            if adapter is not None:
                self.adapters.release(request.adapter, adapter)
            raise

    def _submit(self, request: Request, sink: Sink, adapter: Future[Adapter] | None) -> None:
        if not self._matchers.are_wanted(request):
            self._loop.submit(request, sink, adapter=adapter)
            return
        matchers = self._matchers.prepare(request)
        # The matchers hold `min_tokens`, since a grammar may end earlier.
        stop = replace(request.stop, min_tokens=0)
        self._loop.submit(replace(request, stop=stop), sink, matchers, adapter)

    def rank_skew_s(self, start_ns: int, end_ns: int) -> float:
        """How long the fastest rank waited for the slowest, in the steps that ended between two
        times, Unix nanoseconds; 0 with one rank."""
        return self.ranks.skew_between(start_ns, end_ns)

    def deliver(
        self, request_id: bytes, records: Sequence[TokenRecord], drafted_from: int | None = None
    ) -> None:
        """RECEIVE: the KV of the whole prompt is in the reserved pages.

        Args:
            request_id: a request that got Reserved; others are ignored.
            records: the next token of every choice.
            drafted_from: the page from which on what a draft head keeps is there, too; None: it
                did not come.
        """
        self._loop.post(Delivery(request_id, records, drafted_from))

    def cancel(self, request_id: bytes) -> None:
        """Ends a request. Pages that a transfer may still use wait for `release`."""
        self._loop.post(lambda scheduler: scheduler.requests.cancel(request_id))

    def release(self, request_id: bytes) -> None:
        """Frees a request's pages, since no transfer uses them any more. Unknown ids are
        ignored."""
        self._loop.post(lambda scheduler: scheduler.requests.release(request_id))

    def subscribe(self, listener: Callable[[CacheEvent], None]) -> None:
        """Calls `listener` for every page that the prefix cache stores, finds or evicts from now
        on. It runs on the step loop's thread and must return at once."""

        def deliver_events(events: CacheEvents) -> None:
            for event in events.each():
                listener(event)

        self._loop.post(lambda scheduler: scheduler.blocks.subscribe(deliver_events))

    def report_pages(self, report: ReportPages) -> None:
        """Reports all pages that can be found by their keys, and then each change."""

        def begin(scheduler: Scheduler) -> None:
            report_pages(scheduler.blocks, POOL, report)
            for number, group in enumerate(scheduler.others.groups, 1):
                report_pages(group.blocks, POOL, report, number)
            scheduler.tiers.report_pages(report)

        self._loop.post(begin)

    def profile(self, steps: int, folder: Path) -> None:
        """Records the next `steps` steps as a Chrome trace in `folder`, and logs its path."""
        self._loop.profiler.request(steps, folder)

    def load(self) -> EngineLoad:
        """The step loop's last snapshot."""
        return self._loop.load


def _ranks(config: EngineConfig, beside: str, hosts: OtherHosts | None) -> Ranks:
    """The other ranks, not started yet."""
    try:
        if config.expert_group:
            return GroupedRanks(config)
        return NoRanks() if config.ranks == 1 else HostRanks(config, beside, hosts)
    except OSError as error:
        raise NotNowError(f"no rank can be started: {error}") from error


def _model_info(
    config: EngineConfig, loaded: LoadedModel, pools: KvPools, hooks: Sequence[Hook]
) -> ModelInfo:
    model, pool = loaded.config, pools.first
    agreed = {
        "revision": loaded.revision,
        "dtype": config.dtype,
        "precision": loaded.precision,
        "page_size": config.page_size,
        "layout": pool.layout,
        "model": asdict(model),
    }
    if len(pools) > 1:
        agreed["groups"] = [(spec.name, spec.layers) for spec in pools.specs]
        kinds = zip(pools.specs, pools, strict=True)
        agreed["states"] = [each.layout for spec, each in kinds if isinstance(spec.kind, State)]
    if both := [spec for spec, hook in zip(config.hooks, hooks, strict=True) if hook.needs_both]:
        agreed["hooks"] = sorted(both)
    digest = hashlib.sha256(json.dumps(agreed, sort_keys=True, default=str).encode())
    return ModelInfo(
        name=config.name,
        path=loaded.path,
        revision=loaded.revision,
        fingerprint=digest.hexdigest()[:32],
        max_context_tokens=config.max_context_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        page_size_tokens=config.page_size,
        num_kv_heads=model.kept.kv_heads,
        kv_precision=pool.precision,
        prefix_cache=config.prefix_cache,
        resume_pages=tuple(
            kind.pages_before(config.page_size)
            for kind in (spec.kind for spec in pools.specs)
            if not isinstance(kind, Full)
        ),
        extensions=tuple(hook.name for hook in hooks),
        sampling=_sampling(config, loaded),
        pooling=loaded.pooling,
    )


def _sampling(config: EngineConfig, loaded: LoadedModel) -> SamplingDefaults:
    if not config.generation_config:
        return SamplingDefaults()
    try:
        return sampling_defaults(Path(loaded.path))
    except CheckpointError as error:
        raise ModelError(str(error)) from error
