"""Workers that are told to end while they are needed: what is under way gets to its end.

Their model has no tokenizer: ids in, ids out.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from cluster import Cluster, Process, running, spawn
from grpc_health.v1 import health_pb2, health_pb2_grpc
from nursery import fork
from tiny_models import write_tiny_model
from transformers import AutoModelForCausalLM
from waiting import wait_until

from baton.client.generation import Generation
from baton.errors import BatonError
from worker.server import SERVICE_NAME

END_S = 30.0
LONG_PROMPT = 3000
LONG_OUTPUT = 120
"""Either keeps a worker busy for some 3 s where its steps are slowed down."""
PROMPT_STEP_S = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return write_tiny_model(path, max_positions=16384, tokenizer=False)


@pytest.fixture(scope="module")
def cluster(folder, tmp_path_factory):
    """The first of each worker is a new interpreter, which is to end in order too."""
    seen = {"router"}

    def launch(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        begin = fork if log.stem in seen else spawn
        seen.add(log.stem)
        return begin(argv, environment, log)

    with running(
        folder,
        tmp_path_factory.mktemp("logs"),
        num_pages=1100,
        max_step_tokens=64,
        failpoints="live",
        launch=launch,
    ) as cluster:
        yield cluster


class Asked:
    """A request that is read in a thread of its own."""

    def __init__(self, cluster: Cluster, prompt_tokens: int, max_tokens: int) -> None:
        self.first_token = threading.Event()
        self.result: Generation | None = None
        self.error: BatonError | None = None
        self._cluster = cluster
        rng = np.random.default_rng(prompt_tokens)
        self._prompt = rng.integers(5, 384, prompt_tokens).tolist()
        self._max_tokens = max_tokens
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def end(self) -> Generation:
        """The whole of it; raises what it failed with."""
        self._thread.join(END_S)
        assert not self._thread.is_alive(), self._cluster.tail()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def _read(self) -> None:
        options = {"max_tokens": self._max_tokens, "temperature": 0.0, "ignore_eos": True}
        with self._cluster.client() as client:
            stream = client.stream(token_ids=self._prompt, timeout_s=60, **options)
            try:
                for _ in stream:
                    self.first_token.set()
                self.result = stream.result
            except BatonError as error:
                self.error = error


def terminate(cluster: Cluster, name: str) -> None:
    cluster.processes[name].send_signal(signal.SIGTERM)


def exit_code(cluster: Cluster, name: str) -> int:
    """And a successor, for the next test."""
    code = cluster.processes[name].wait(END_S)
    cluster.start(name)
    cluster.wait_ready()
    return code


def wait_until_computing(cluster: Cluster) -> None:
    wait_until(lambda: cluster.load("prefill-0").queued_prefill_tokens)


def wait_until_draining(cluster: Cluster, name: str) -> None:
    wait_until(lambda: not serves(cluster, name))


def serves(cluster: Cluster, name: str) -> bool:
    with grpc.insecure_channel(cluster.workers[name]) as channel:
        check = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        answer = health_pb2_grpc.HealthStub(channel).Check(check, timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_a_model_without_a_tokenizer_takes_ids_and_gives_ids(cluster, folder):
    prompt = list(range(5, 42))
    with cluster.client() as client:
        assert [model.has_tokenizer for model in client.models()] == [False]
        result = client.generate(token_ids=prompt, max_tokens=6, temperature=0, ignore_eos=True)
        for asked in ({"prompt": "text"}, {"token_ids": prompt, "stop": ["fox"]}):
            with pytest.raises(BatonError, match="tokenizer") as refused:
                client.generate(max_tokens=6, **asked)
            assert refused.value.reason == "INVALID_FIELD"
    assert result.text == ""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert list(result.token_ids) == tokens[len(prompt) :]
    cluster.check_baseline()


def test_a_prefill_worker_sends_what_it_computes(cluster):
    cluster.slow_down("prefill-0", step_s=PROMPT_STEP_S)
    asked = Asked(cluster, LONG_PROMPT, 8)
    wait_until_computing(cluster)
    terminate(cluster, "prefill-0")
    assert len(asked.end().token_ids) == 8
    assert exit_code(cluster, "prefill-0") == 0
    cluster.check_baseline()


def test_a_decode_worker_finishes_its_streams_and_takes_no_more(cluster):
    cluster.slow_down("decode-0")
    asked = Asked(cluster, 40, LONG_OUTPUT)
    assert asked.first_token.wait(END_S)
    terminate(cluster, "decode-0")
    wait_until_draining(cluster, "decode-0")
    with pytest.raises(BatonError) as refused:
        Asked(cluster, 41, 8).end()
    assert refused.value.reason in ("DRAINING", "WORKER_LOST"), "by the router, or by the worker"
    assert len(asked.end().token_ids) == LONG_OUTPUT
    assert exit_code(cluster, "decode-0") == 0
    cluster.check_baseline()
