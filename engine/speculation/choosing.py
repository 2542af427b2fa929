"""Chooses a drafter by its name, and says what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from engine.config import OFF, EngineConfig
from engine.speculation.drafter import Drafter
from engine.speculation.suffix import SuffixDrafter
from engine.speculation.tables import SlotTables
from engine.speculation.verifying import Verifier

MOST_DRAFTS: Final = 7
"""Most drafts of a row: with its last token they are a width of 8."""
DRAFTERS: Final[dict[str, Callable[[int], Drafter]]] = {"suffix": SuffixDrafter}
"""Made with the most drafts of a row."""


class SpeculationError(ValueError):
    """Drafts cannot be verified as configured; the message says what to change."""


def check(config: EngineConfig) -> None:
    """Looks whether drafts can be verified as configured.

    Raises:
        SpeculationError: there is no such drafter, or it cannot draft so many tokens.
    """
    if config.speculation not in (*DRAFTERS, OFF):
        known = ", ".join((*DRAFTERS, OFF))
        raise SpeculationError(f"speculation {config.speculation!r} is not one of {known}")
    if not 1 <= config.draft_tokens <= MOST_DRAFTS:
        raise SpeculationError(
            f"draft_tokens {config.draft_tokens} must be from 1 to {MOST_DRAFTS}"
        )


def drafter_of(config: EngineConfig) -> Drafter | None:
    """A rank's drafter; None: drafts are off."""
    return DRAFTERS[config.speculation](config.draft_tokens) if config.speculates else None


def tables_of(config: EngineConfig, vocab_size: int, device: torch.device) -> SlotTables:
    """A rank's tables by slot."""
    bounds = config.max_sequences, config.max_context_tokens
    return SlotTables(*bounds, config.draft_tokens, vocab_size, device)


def verifier_of(config: EngineConfig, vocab_size: int, device: torch.device) -> Verifier | None:
    """A rank's verifier; None: drafts are off."""
    drafter = drafter_of(config)
    if drafter is None:
        return None
    return Verifier(tables_of(config, vocab_size, device), drafter)


def pages_ahead(config: EngineConfig) -> int:
    """Pages to keep back for the growth of a sequence: the steps in flight may store as many tokens
    as two of them compute for it. 0: drafts are off."""
    most = 2 * (1 + config.draft_tokens)
    return 1 + -(-most // config.page_size) if config.speculates else 0
