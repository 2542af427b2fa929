"""Two routers share their workers, and know nothing of each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from cluster import Cluster, make_cluster
from streams import prompt_of, read
from tiny_models import write_tiny_model

from baton import up
from baton.errors import BatonError

OPTIONS = {"temperature": 0.0}


@pytest.fixture
def routers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """The cluster as either of them has it."""
    cluster = make_cluster(
        write_tiny_model(tmp_path_factory.mktemp("model"), max_positions=4096),
        tmp_path_factory.mktemp("logs"),
        failpoints="live",
        poison_freed_pages=True,
        max_sequences=8,
    )
    second = beside(cluster)
    try:
        cluster.start_all()
        second.wait_ready()
        yield cluster, second
    finally:
        cluster.stop()


def beside(cluster: Cluster) -> Cluster:
    """The same workers and a second router, which `cluster` starts and stops."""
    options = up.UpOptions("unused", device="cpu", trace=False, drain_s=10.0,
                           grpc_port=0, http_port=0, admin_port=0)  # fmt: skip
    more = up.plan(options)
    first, argv = _flag(cluster.plan.specs[0].argv), list(more.specs[0].argv)
    argv[argv.index("--name") + 1] = "router-1"
    both = f"{first},{_flag(argv)}"
    workers = [
        replace(spec, argv=[both if word == first else word for word in spec.argv])
        for spec in cluster.plan.specs[1:]
    ]
    routers = (cluster.plan.specs[0], replace(more.specs[0], name="router-1", argv=argv))
    cluster.plan = replace(cluster.plan, specs=(*routers, *workers))
    addresses = {"router_address": more.router_address, "admin_address": more.admin_address}
    return replace(cluster, plan=replace(cluster.plan, **addresses))


def _flag(argv: list[str]) -> str:
    return argv[argv.index("--internal-listen") + 1]


def test_two_routers_share_workers_and_the_death_of_one_is_not_the_others(routers):
    """Each overcommits what both count on: requests wait, and none meets another's pages."""
    first, second = routers
    prompts = [prompt_of(300, seed=i) for i in range(10)]
    with first.client() as one, second.client() as other:
        mine = [read(one, prompt, max_tokens=40, **OPTIONS) for prompt in prompts]
        theirs = [read(other, prompt, max_tokens=40, **OPTIONS) for prompt in reversed(prompts)]
        for a in (*mine, *theirs):
            a.end()
            assert a.error is None, a.error
        assert [a.tokens() for a in mine] == [b.tokens() for b in reversed(theirs)]
        first.slow_down("decode-0")
        doomed = [read(one, prompt, max_tokens=2000, **OPTIONS) for prompt in prompts[:3]]
        living = [read(other, prompt, max_tokens=60, **OPTIONS) for prompt in prompts[3:6]]
        for reading in (*doomed, *living):
            reading.until(10)
        first.kill("router")
        for reading in doomed:
            reading.end()
            assert isinstance(reading.error, BatonError)
        first.disarm()
        for reading, before in zip(living, mine[3:6], strict=True):
            reading.end()
            assert reading.error is None, reading.error
            assert reading.tokens()[:40] == before.tokens()
    second.baselines = first.baselines
    second.check_baseline()
    first.start("router")
    first.wait_ready()
    with first.client() as one:
        again = one.generate(token_ids=prompts[0], max_tokens=40, ignore_eos=True, **OPTIONS)
    assert list(again.token_ids) == mine[0].tokens()
    for name in first.workers:
        assert first.metric("baton_kv_damaged_pages_total", name) == 0
    first.check_baseline()
