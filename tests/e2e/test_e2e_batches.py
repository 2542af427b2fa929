"""Batches over /v1/batches, in a folder that two routers share: kills lose and double nothing."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
from cluster import Cluster, running
from openai import APIConnectionError, OpenAI
from openai.types import Batch
from tiny_models import write_tiny_model

from telemetry.names import Metric

URL = "/v1/completions"
LINES_A_KILL = 12
STEP_S = 0.02


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("batches")
    own = {"batches_folder": folder / "kept", "batch_requests": 2}
    with running(
        write_tiny_model(folder / "model"),
        folder / "logs",
        routers=2,
        own={"router-0": own, "router-1": own},
        failpoints="live",
    ) as cluster:
        yield cluster
        cluster.check_baseline()


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_routers_that_are_killed_lose_and_double_nothing(cluster: Cluster, kills: int) -> None:
    """Each time the one that runs the batch, at a random point."""
    body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    prompts = [f"The quick brown fox {number}" for number in range(LINES_A_KILL * (kills + 1))]
    content = "".join(
        json.dumps(
            {"custom_id": one, "method": "POST", "url": URL, "body": {"prompt": one, **body}}
        )
        + "\n"
        for one in prompts
    )
    cluster.slow_down("decode-0", step_s=STEP_S)
    draw, killed = random.Random(kills), Counter[str]()
    url = f"http://{cluster.plan.http_address}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=8) as client:
        file = client.files.create(file=("in.jsonl", content.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h")
        for _ in range(kills):
            holder = who_runs(cluster)
            time.sleep(draw.uniform(0, 1))
            cluster.kill(holder)
            cluster.start(holder)
            killed[holder] += 1
        cluster.wait_ready()
        cluster.disarm()
        batch = wait(client, batch.id)
        counts = batch.request_counts
        assert (batch.status, counts.completed, counts.failed) == ("completed", len(prompts), 0)
        found = [
            json.loads(line) for line in client.files.content(batch.output_file_id).iter_lines()
        ]
        assert Counter(one["custom_id"] for one in found) == Counter(prompts)
        for one in draw.sample(found, 5):
            again = client.completions.create(model="", prompt=one["custom_id"], extra_body=body)
            assert one["response"]["body"]["choices"][0]["text"] == again.choices[0].text
    assert killed.total() == kills


def who_runs(cluster: Cluster) -> str:
    for _ in range(200):
        for name in cluster.routers:
            with suppress(OSError):  # It is not back yet.
                if cluster.metric(Metric.BATCHES_RUNNING, name):
                    return name
        time.sleep(0.05)
    raise AssertionError("nobody runs the batch")


def wait(client: OpenAI, batch_id: str) -> Batch:
    for _ in range(600):
        try:
            batch = client.batches.retrieve(batch_id)
        except APIConnectionError:
            continue
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        time.sleep(0.2)
    raise AssertionError(batch)
