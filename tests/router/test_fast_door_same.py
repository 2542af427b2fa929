"""What holds at gRPC's own server holds at the fast door: the same tests, run there."""

from __future__ import annotations

import frontdoor_kit
import pytest
from test_frontdoor_errors import *  # noqa: F403
from test_frontdoor_stream import *  # noqa: F403
from test_shape_grpc import *  # noqa: F403

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _at_the_fast_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontdoor_kit, "DOORS", [frontdoor_kit.fast_door])
