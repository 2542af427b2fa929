"""What tests of whole clusters share: a tiny model, written once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a tokenizer and contexts of 16,384. Nobody writes into its folder."""
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_positions=16384)
