"""Chooses a drafter by its name, and says what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from engine.config import MOST_DRAFTS, MTP, OFF, SUFFIX, EngineConfig
from engine.speculation.drafter import Drafter
from engine.speculation.suffix import SuffixDrafter
from engine.speculation.tables import SlotTables
from engine.speculation.verifying import Verifier

DRAFTERS: Final[dict[str, Callable[[int], Drafter]]] = {SUFFIX: SuffixDrafter}
"""Made with the most drafts of a row."""


class SpeculationError(ValueError):
    """Drafts cannot be verified as configured; the message says what to change."""


def check(config: EngineConfig, device: str) -> None:
    """Looks whether drafts can be verified as configured, on this device.

    Raises:
        SpeculationError: there is no such drafter, or it cannot draft so many tokens, or not here.
    """
    own = config.speculation == MTP
    if has_head(config) and not own and not Path(config.speculation).expanduser().is_dir():
        known = ", ".join((*DRAFTERS, MTP, OFF))
        raise SpeculationError(
            f"speculation {config.speculation!r} is not one of {known}, and no folder of a draft"
            " head"
        )
    if not 1 <= config.draft_tokens <= MOST_DRAFTS:
        raise SpeculationError(
            f"draft_tokens {config.draft_tokens} must be from 1 to {MOST_DRAFTS}"
        )
    on_gpu = device != "cpu"
    if config.synthetic_acceptance >= 0:
        _check_synthetic(config, on_gpu=on_gpu)


def _check_synthetic(config: EngineConfig, *, on_gpu: bool) -> None:
    if config.synthetic_acceptance > 1:
        raise SpeculationError(
            f"synthetic_acceptance {config.synthetic_acceptance} must be at most 1"
        )
    if config.load_format != "dummy":
        raise SpeculationError(
            "synthetic_acceptance makes up the output: it needs load_format dummy, not"
            f" {config.load_format}"
        )
    if config.speculation == OFF or not on_gpu:
        raise SpeculationError("synthetic_acceptance needs speculation, and a GPU")


def has_head(config: EngineConfig) -> bool:
    """Whether a draft head guesses. It keeps KV, also where nobody decodes."""
    return config.speculation not in (*DRAFTERS, OFF)


def drafter_of(config: EngineConfig) -> Drafter | None:
    """A rank's drafter that has no weights; None: there is none."""
    if not config.speculates or has_head(config):
        return None
    return DRAFTERS[config.speculation](config.draft_tokens)


def tables_of(config: EngineConfig, vocab_size: int, device: torch.device) -> SlotTables:
    """A rank's tables by slot."""
    bounds = config.max_sequences, config.max_context_tokens
    return SlotTables(*bounds, config.draft_tokens, vocab_size, device)


def verifier_of(
    config: EngineConfig, vocab_size: int, device: torch.device, head: Drafter | None = None
) -> Verifier | None:
    """A rank's verifier; None: drafts are off. `head`: what guesses with a draft head."""
    drafter = drafter_of(config) or head
    if drafter is None or not config.speculates:
        return None
    return Verifier(tables_of(config, vocab_size, device), drafter)


def tokens_ahead(config: EngineConfig) -> int:
    """Places behind a decode step's own where its drafter stores something."""
    return config.draft_tokens - 1 if config.speculates and has_head(config) else 0


def pages_ahead(config: EngineConfig) -> int:
    """Pages to keep back for the growth of a sequence: the steps in flight may store as many tokens
    as two of them compute for it, and a drafter some more. 0: drafts are off."""
    most = 2 * (1 + config.draft_tokens) + tokens_ahead(config)
    return 1 + -(-most // config.page_size) if config.speculates else 0
