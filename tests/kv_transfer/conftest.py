from __future__ import annotations

from collections.abc import Iterator

import pytest
from kv_world import KINDS, World, a_world


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two sides in one process that have met."""
    with a_world(request.param) as world:
        yield world


@pytest.fixture
def loopback() -> Iterator[World]:
    """Two sides over loopback, where a test decides when and how a push ends."""
    with a_world("loopback") as world:
        yield world
