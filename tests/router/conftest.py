"""What tests of the dispatcher share: a router's inner parts, between workers that they script."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from scripted_worker import Cluster


@pytest.fixture
def usual() -> dict[str, Any]:
    """Settings of every `cluster` of a module, which has a fixture of this name for them."""
    return {}


@pytest.fixture
async def cluster(request: pytest.FixtureRequest, usual: dict[str, Any]) -> AsyncIterator[Cluster]:
    """With the settings of `scripted_worker.with_settings`, if the test has them. Nothing is left
    behind at the end."""
    cluster = Cluster(**usual | getattr(request, "param", {}))
    yield cluster
    cluster.check_nothing_leaked()
    await cluster.close()
