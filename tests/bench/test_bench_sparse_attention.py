"""The steps that the benchmark drives are those of an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import write_tiny_model

from bench.sparse_attention import PAGE, Rig, Segment, _pages, _segment_tables


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("sparse") / "model", layers=4)


def test_rows_that_read_all_lose_what_a_prompt_loses(model):
    ids = np.random.default_rng(0).integers(1, 380, 340).tolist()
    count = -(-len(ids) // PAGE)
    segments, budgets = [Segment(288, 300), Segment(320, 332)], (256, 512)
    rig = Rig(model, 3, 400)
    dense = rig.prefill(ids, _pages(1, count), scored=True)
    tables = _segment_tables(segments, len(budgets), count)
    assert len(np.unique(tables[:, 20])) > 2
    lost = torch.zeros(12, 4)
    for step in range(12):
        at = np.repeat([segment.start + step for segment in segments], 2)
        tokens = np.array([ids[place] for place in at], np.int32)
        logits = rig.decode(tokens, at, tables, budgets * 2)
        following = torch.tensor([ids[place + 1] for place in at])
        lost[step] = torch.nn.functional.cross_entropy(logits, following, reduction="none")
    for column, segment in ((1, segments[0]), (3, segments[1])):
        assert torch.allclose(lost[:, column], dense[segment.start : segment.end], atol=1e-4)
    for column, segment in ((0, segments[0]), (2, segments[1])):
        assert not torch.allclose(lost[:, column], dense[segment.start : segment.end], atol=1e-2)
