"""What an engine's configuration means on a device: its defaults, and what cannot be had there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from engine import memory
from engine.bounds import MOST_RANKS
from engine.checkpoints import Weights
from engine.config import MTP, EngineConfig, tiers_obstacle
from engine.parts.adapters import check_adapters
from engine.parts.paging import EngineError, NotNowError
from engine.pool.kinds import PoolError, pool_type
from engine.speculation import choosing
from engine.step.dispatch import GroupPlace, place_of
from engine.tiers.stores.opening import look_at
from engine.tiers.stores.protocol import StoreError
from engine.tiers.touching import HostMemoryError, check_total


def with_defaults(config: EngineConfig) -> EngineConfig:
    """The configuration with the values that depend on the device.

    Raises:
        EngineError: something of it cannot be had here.
    """
    device = config.device
    has_gpu = torch.cuda.is_available()
    if device == "auto":
        device = "cuda" if has_gpu else "cpu"
    if torch.device(device).type == "cuda" and not has_gpu:
        kind, why = EngineError, "is a build without CUDA"
        if torch.version.cuda:  # A driver may be loaded later, and a GPU that is lost come back.
            kind, why = NotNowError, "finds no GPU here"
        raise kind(f"the device cannot be {device}: the PyTorch that is installed {why}")
    try:
        pool_type(config.kv_cache_dtype, config.page_size)
        choosing.check(config, device)
    except (PoolError, choosing.SpeculationError) as error:
        raise EngineError(str(error)) from error
    check_adapters(config)
    _check_tiers(config)
    on_cpu = device == "cpu"
    _check_ranks(config, device)
    if config.expert_group and device == "cuda" and torch.cuda.device_count() > 1:
        device = f"cuda:{place_of(config.expert_group).rank}"
    step_tokens = config.max_step_tokens or _usual_step_tokens(config, on_cpu=on_cpu)
    if step_tokens < max(config.page_size, config.max_sequences + config.page_size):
        raise EngineError(
            f"max_step_tokens {step_tokens} must be at least max_sequences {config.max_sequences}"
            f" plus page_size {config.page_size}"
        )
    if config.mixed_prefill_tokens < config.page_size:
        raise EngineError(
            f"mixed_prefill_tokens {config.mixed_prefill_tokens} must be at least page_size"
            f" {config.page_size}: prompts are computed in whole pages"
        )
    return replace(
        config,
        device=device,
        dtype=memory.dtype_on(config.dtype, on_gpu=not on_cpu),
        name=config.name or Path(config.model).name,
        max_step_tokens=step_tokens,
    )


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Until it ends, kernels of ours that this thread launches run on the device: they are for the
    thread's GPU, wherever their tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def use_device(device: torch.device) -> None:
    """From now on `on_device` holds for this thread. A device without an index is the thread's."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def check_memory(config: EngineConfig, weights: Weights, device: torch.device) -> None:
    """Compares weights and pool with the memory that is free."""
    on_gpu = device.type == "cuda"
    need = memory.need_of(
        weights,
        dtype=config.dtype,
        kv_memory_bytes=config.kv_memory_bytes,
        num_pages=config.num_pages,
        on_gpu=on_gpu,
        workers=1 if on_gpu else config.ranks,
    )
    free, total = torch.cuda.mem_get_info(device) if on_gpu else memory.available_and_all_bytes()
    try:
        memory.check(need, free, str(device) if on_gpu else "this machine")
    except memory.NoRoomError as error:
        kind = NotNowError if need.all_bytes <= total else EngineError
        raise kind(str(error)) from error


def _check_tiers(config: EngineConfig) -> None:
    """Whether there can be the tiers below the pool, as far as that is known before weights are
    read."""
    host, stores = config.kv_host_bytes > 0, config.kv_stores
    if obstacle := tiers_obstacle(host=host, stores=bool(stores), prefix_cache=config.prefix_cache):
        raise EngineError(obstacle)
    try:
        check_total(config.kv_host_bytes // config.nodes)
        for address in stores:
            look_at(address, config.kv_secret_file)
    except (HostMemoryError, StoreError) as error:
        raise EngineError(str(error)) from error


def _check_ranks(config: EngineConfig, device: str) -> None:
    if obstacle := _ranks_obstacle(config) or _group_obstacle(config, device):
        raise EngineError(obstacle)
    if config.ranks > 1 and device != "cpu":
        _check_gpus(config, device)


def _ranks_obstacle(config: EngineConfig) -> str:
    """Why the model cannot have such ranks; empty: it can."""
    for name, count in (("tp", config.tp), ("pp", config.pp)):
        if count < 1:
            return f"{name} {count} must be at least 1"
    pp = config.pp
    if config.pp_layers and len(config.pp_layers) != pp:
        layers = ",".join(map(str, config.pp_layers))
        return f"pp_layers {layers} must be a number for each of {pp} stages"
    if bands := _bands_obstacle(config):
        return bands
    if config.expert_parallel and config.tp == 1:
        return "expert_parallel divides experts among the ranks of tp, and tp is 1: set tp"
    if pp == 1:
        return ""
    if config.ranks > MOST_RANKS:
        return f"pp {pp} times tp {config.tp} must be at most {MOST_RANKS} ranks"
    if config.speculates:
        return (
            f"speculation {config.speculation} needs pp 1: the last stage drafts and verifies, and"
            " the first one would have to embed drafts that it does not know"
        )
    if choosing.has_head(config):
        return (
            f"speculation {config.speculation} needs pp 1, also where nobody decodes: a draft head"
            " reads what layers of all stages have made"
        )
    if config.hooks:
        return f"hooks need pp 1: they see all layers, and pp {pp} gives each stage some"
    if config.kv_host_bytes:
        return (
            "kv_host_gib needs pp 1: pages of stages differ in size, and their host memory would"
            " not hold the same ones"
        )
    return ""


def _bands_obstacle(config: EngineConfig) -> str:
    """Why pages cannot have such bands; empty: they can."""
    if config.kv_bands < 1:
        return f"kv_bands {config.kv_bands} must be at least 1"
    if config.kv_bands == 1:
        return ""
    if config.hooks:
        return "hooks need kv_bands 1: they read all layers of a head in one run"
    if config.kv_stores:
        return "kv_store needs kv_bands 1: the objects of other workers have no bands"
    return ""


def _group_obstacle(config: EngineConfig, device: str) -> str:
    """Why the worker cannot be in an expert group; empty: it can, or it is in none."""
    if not config.expert_group:
        return ""
    try:
        place = place_of(config.expert_group)
    except ValueError as error:
        return str(error)
    if config.ranks > 1:
        return "expert_group needs tp 1 and pp 1: its workers are ranks themselves"
    if config.speculation == MTP:
        return (
            "speculation mtp cannot be set with expert_group: the draft layer has experts, too, and"
            " workers draft at different times"
        )
    return "" if device == "cpu" else _obstacle_on_gpus(config, place)


def _obstacle_on_gpus(config: EngineConfig, place: GroupPlace) -> str:
    """Why the worker cannot be in an expert group on GPUs, where a worker without tokens runs steps
    of padding; empty: it can."""
    count = torch.cuda.device_count()
    if config.device in ("auto", "cuda") and 1 < count <= place.rank:
        return (
            f"expert_group: rank {place.rank} has GPU {place.rank}, and {count} can be seen here:"
            " name another one by device, or let each worker see its own alone"
        )
    if config.hooks:
        return "hooks need expert_group on CPUs: on GPUs a step of padding would call them"
    if config.speculates:
        return (
            f"speculation {config.speculation} needs expert_group on CPUs: on GPUs workers whose"
            " rows have different numbers of drafts would have no graph in common"
        )
    return ""


def _check_gpus(config: EngineConfig, device: str) -> None:
    """Each of several ranks has a GPU. Stages of one rank may share the one that is named."""
    tp, ranks, count = config.tp, config.ranks // config.nodes, torch.cuda.device_count()
    if device != "cuda":
        if tp > 1:
            raise EngineError(
                f"{device} names one GPU for {tp} ranks: set device to cuda, or tp to 1"
            )
        return
    if ranks > count:
        wanted, fewer = f"tp {tp} needs", f"tp to at most {count}"
        if config.pp > 1:
            wanted, fewer = f"pp {config.pp} times tp {tp} need", "less of them"
        if config.nodes > 1:
            wanted += f" on each of {config.nodes} hosts"
        raise EngineError(
            f"{wanted} {ranks} GPUs, and {count} can be seen here: set {fewer}, or device to cpu"
        )


def _usual_step_tokens(config: EngineConfig, *, on_cpu: bool) -> int:
    """The default step size, tokens. Longer ones are faster by percents, but decode rows wait."""
    if on_cpu:
        return 512
    return 2048 if config.decodes and not config.flexible else 4096
