"""What a hand-off of a prompt moves, by cache group."""

from __future__ import annotations

import pytest

from kv_transfer.types import PageGroup
from worker_base.page_layout import PageLayout

GROUPS = (PageGroup(4096, 100), PageGroup(512, 40))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 18, 24, 128])
def test_a_window_can_be_resumed_at_the_last_border_too(window: int) -> None:
    layout = PageLayout(16, GROUPS, (None, window))
    assert layout.pool_bytes == 100 * 4096 + 40 * 512
    for tokens in range(1, 300):
        end = -(-tokens // 16)
        assert layout.granted_range(0, tokens) == (0, end)
        first, last = layout.granted_range(1, tokens)
        # The token at N sees [N-W+1, N]; that at the last border before N sees as many before it.
        border = (tokens - 1) // 16 * 16
        assert first * 16 <= max(0, min(tokens, border) - window + 1)
        assert last == end
        assert first == 0 or (first + 1) * 16 > border - window + 1
        size = end * 4096 + (last - first) * 512
        assert layout.prompt_bytes(tokens) == size
