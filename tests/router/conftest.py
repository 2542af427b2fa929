"""What tests of the dispatcher share: a router's inner parts, between workers that they script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from frontdoor_kit import write_tokenizer
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_worker import Cluster

from router.answers.token_texts import TokenTexts
from telemetry.names import Service
from telemetry.tracing import Tracing, setup_tracing


@pytest.fixture(scope="session", autouse=True)
def _texts_are_read_once() -> Iterator[None]:
    """Of equal tokenizers, which most tests here write. To compare them with what each decodes
    takes 0.1 s of CPU, twice a test."""
    read, known = TokenTexts.of, dict[str, TokenTexts | None]()

    def of(backend: tokenizers.Tokenizer) -> TokenTexts | None:
        if (key := backend.to_str()) not in known:
            known[key] = read(backend)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenTexts, "of", of)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that has a tokenizer alone."""
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Has the spans of `tracing`."""
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    """A router's spans are recorded."""
    tracing = setup_tracing(Service.ROUTER, "r", exporter=exporter)
    assert tracing is not None
    yield tracing
    tracing.shutdown()


@pytest.fixture
def usual() -> dict[str, Any]:
    """Settings of every `cluster` of a module, which has a fixture of this name for them."""
    return {}


@pytest.fixture
async def cluster(request: pytest.FixtureRequest, usual: dict[str, Any]) -> AsyncIterator[Cluster]:
    """With the settings of `scripted_worker.with_settings`, if the test has them. Nothing is left
    behind at the end."""
    cluster = Cluster(**usual | getattr(request, "param", {}))
    yield cluster
    cluster.check_nothing_leaked()
    await cluster.close()
