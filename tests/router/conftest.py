"""What tests of the dispatcher share: a router's inner parts, between workers that they script."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import tokenizers
from scripted_worker import Cluster

from router.answers.token_texts import TokenTexts


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
