"""A worker whose ranks are on two hosts, which are namespaces of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from group_kit import WORKER, Group, group
from hosts_kit import NEEDS, Host, can_have_hosts, other_host
from references import references
from tiny_models import write_tiny_model

pytestmark = pytest.mark.skipif(not can_have_hosts(), reason=NEEDS)
OPTIONS = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    with other_host() as made:
        yield made


def check(group: Group, model: Path) -> None:
    with group.cluster.client() as client:
        for length in (5, 40, 200):
            prompt = np.random.default_rng(length).integers(1, 384, length).tolist()
            answer = client.generate(token_ids=prompt, **OPTIONS)
            want = references(model)(prompt, 12, past_end=True)
            assert list(answer.token_ids) == want.tokens


def test_the_tokens_are_those_of_one_process(host: Host, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", layers=4)
    with group(model, tmp_path, host) as made:
        made.start_agent()
        with made.cluster.started():
            assert (len(made.ranks_here()), len(made.ranks())) == (0, 1)
            check(made, model)
            assert made.cluster.metric("baton_prefill_tokens_total", WORKER) >= 245
            made.cluster.check_baseline()
        assert made.agents[0].wait(20) == 0
