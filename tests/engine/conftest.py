"""What many tests of engines share: a tiny model, written once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers without a tokenizer. Nobody writes into its folder."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False)


@pytest.fixture
def weights_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads a model's weights fails."""

    def refuse(*_: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr("engine.model.loading.fill", refuse)
    monkeypatch.setattr("engine.model.wrapped.loading.fill", refuse)


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is late that comes from lower tiers, and no page is computed because that is said to
    be sooner: a machine that stands still for a moment would decide so."""
    for module in ("fetching", "lanes"):
        monkeypatch.setattr(f"engine.tiers.{module}.LEAST_DEADLINE_S", 30.0)
    monkeypatch.setattr("engine.tiers.tiers.HostTiers.note_rate", lambda *_: None)
