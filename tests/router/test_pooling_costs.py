"""What embeddings and scores may cost the router."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest
from openai_kit import Port, open_port

from baton.worker.v1 import worker_pb2
from router.jobs import Job, JobEvent, JobFinished, JobPooled

WIDTH = 4096
VECTOR = np.arange(WIDTH, dtype="<f4")


async def pools(job: Job) -> AsyncGenerator[JobEvent]:
    yield JobPooled(VECTOR.tobytes())
    yield JobFinished(cached_prompt_tokens=0)


def takes(port: Port, labels: int = 0) -> None:
    held = worker_pb2.PoolingDefaults(kind=worker_pb2.POOL_KIND_LAST, width=WIDTH, labels=labels)
    port.dispatcher.served = [replace(one, pooling=held) for one in port.dispatcher.served]


@pytest.mark.parametrize(("texts", "fits"), [(33, False), (32, True)])
async def test_a_long_query_is_not_read_for_thousands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts: int, fits: bool
) -> None:
    """Also where little of it is kept: one megabyte stood for two gigabytes of tokenizing."""
    monkeypatch.setattr("router.pooling.checking.MOST_PAIRED_CHARS", 32 * 1004)
    async with open_port(tmp_path, pools) as port:
        takes(port, labels=1)
        body = {"query": "fox " * 250, "documents": ["fox "] * texts, "truncate_prompt_tokens": 1}
        url = f"http://{port.server.address}/rerank"
        asked = port.client.post(url, cast_to=object, body=body)
        if fits:
            assert await asked
            return
        with pytest.raises(openai.BadRequestError) as caught:
            await asked
        assert (caught.value.param, port.dispatcher.jobs) == ("documents", [])
