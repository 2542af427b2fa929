"""Stats of ranks whose devices wait for each other, without a device."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from engine.cuda.ranks.collective import CudaCollective
from engine.ranks.stats import RankStats, watched
from engine.step.stages import OneStage


@pytest.fixture
def stats(tmp_path):
    return RankStats(tmp_path, 3, create=True)


def group_of(stats: RankStats) -> CudaCollective:
    """Rank 0, which adds up by NCCL."""
    group = CudaCollective(0, 3, torch.device("cuda"))
    own, _ = watched(group, OneStage(), stats, 0)
    assert own is group, "its host has no times"
    return group


def take_waits(group: CudaCollective, *waited_ns: int) -> None:
    group.begin_step()
    group.take_waits(torch.tensor(waited_ns))


def test_the_longest_wait_less_the_least_is_the_wait_for_the_slowest(stats):
    group = group_of(stats)
    began_ns = time.time_ns()
    take_waits(group, 90_000_000, 5_000_000, 1_000_000)
    assert stats.skew_s is None, "the start is no step"
    take_waits(group, 93_000_000, 15_000_000, 2_000_000)
    assert stats.skew_s == pytest.approx(0.009)
    assert stats.slowest == [0, 0, 1], "it waited least"
    take_waits(group, 93_500_000, 16_500_000, 4_500_000)
    assert stats.skew_s == pytest.approx(0.011)
    assert stats.slowest == [1, 0, 1]
    assert stats.skew.between(began_ns, time.time_ns()) == pytest.approx(0.011)
    loads = stats.loads()
    assert [load.steps for load in loads] == [3, 0, 0], "each rank counts its own"
    assert [load.busy_s for load in loads] == [None] * 3
    waited_s = np.array([load.waited_s for load in loads])
    assert waited_s == pytest.approx([0.0035, 0.0115, 0.0035])


def test_where_sums_go_by_nccl_nothing_is_told(stats):
    """Not a wait of 0."""
    group = group_of(stats)
    group.begin_step()
    assert group.waits() is None
    stats.step_ended()
    assert stats.skew_s is None
    assert [load.waited_s for load in stats.loads()] == [None] * 3
