"""What drafts with a head: its checkpoint, and what runs it in steps."""

from __future__ import annotations

from engine.config import MTP, EngineConfig
from engine.eager.heads import HeadDrafter
from engine.hooks.attention import MakeBackend
from engine.model import LoadedModel
from engine.model.drafts.loading import HeadFolder
from engine.model.drafts.mtp import MtpLayers
from engine.pool.pools import KvPools
from engine.speculation.choosing import has_head


def head_folder(config: EngineConfig) -> HeadFolder | MtpLayers | None:
    """The checkpoint of a rank's head; None: there is none."""
    if not has_head(config):
        return None
    dummy = config.load_format == "dummy"
    if config.speculation == MTP:
        return MtpLayers(config.model, config.quantization, dummy=dummy)
    return HeadFolder(config.speculation, config.tp, dummy=dummy)


def head_drafter(
    config: EngineConfig, loaded: LoadedModel, pools: KvPools, make: MakeBackend
) -> HeadDrafter | None:
    """What drafts with the head; None: there is none. `make`: makes its attention."""
    if loaded.head is None or pools.drafts is None:
        return None
    attention = make(pools.drafts, loaded.head.module.specs)
    return HeadDrafter(loaded.head.module, pools.drafts, attention, config.draft_tokens)
