"""What drafts with a head: its checkpoint, and what runs it in steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.attention.paged import PagedAttention
from engine.config import MTP, EngineConfig
from engine.eager.heads import HeadDrafter
from engine.hooks.attention import MakeBackend
from engine.model import LoadedModel, Model
from engine.model.drafts.eagle3 import Eagle3
from engine.model.drafts.loading import HeadFolder
from engine.model.drafts.mtp import Mtp, MtpLayers
from engine.parts.paging import dtype_of
from engine.pool.pools import KvPools
from engine.speculation.choosing import has_head

if TYPE_CHECKING:
    from engine.cuda.speculation.draft_layers import HeadParts


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
    module = loaded.head.module
    module.finish()
    attention = make(pools.drafts, module.specs)
    return HeadDrafter(module, pools.drafts, attention, config.draft_tokens)


def bytes_of_taps(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes that the head needs on a GPU for the largest step: taps, once for graphs and once for
    others, and what it makes of them. 0: there is no head."""
    if loaded.head is None:
        return 0
    numbers = (2 * len(loaded.head.module.taps) + 8) * loaded.config.hidden_size
    return numbers * config.max_step_tokens * dtype_of(config.dtype).itemsize


def head_parts(loaded: LoadedModel, pools: KvPools, make: MakeBackend) -> HeadParts | None:
    """What the head is made of on a GPU; None: there is none."""
    from engine.cuda.speculation.draft_layers import HeadParts

    if loaded.head is None or pools.drafts is None:
        return None
    module = loaded.head.module
    attention = make(pools.drafts, module.specs)
    assert isinstance(module, Eagle3 | Mtp), "there are no others"
    assert isinstance(attention, PagedAttention), "the model's own is"
    assert isinstance(loaded.model, Model), "others have no heads"
    return HeadParts(module, pools.drafts, attention, loaded.model)
