"""Objects that were there when a process became ready cost its collections nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from serving import garbage


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_a_full_collection_looks_at_what_came_since() -> None:
    before = len(gc.get_objects())
    garbage.set_apart()
    assert len(gc.get_objects()) < before / 10
    node = Node()
    gone = weakref.ref(node)
    assert any(found is node for found in gc.get_objects())
    del node
    gc.collect()
    assert gone() is None


def test_garbage_of_the_start_is_not_kept() -> None:
    node = Node()
    gone = weakref.ref(node)
    del node
    garbage.set_apart()
    assert gone() is None


def test_objects_of_requests_under_way_bring_no_pause() -> None:
    """By Python's own threshold these bring several."""
    garbage.set_apart()
    pauses: list[str] = []
    gc.callbacks.append(lambda phase, _info: pauses.append(phase))
    try:
        under_way = [[{}] for _ in range(garbage.YOUNG // 4)]
    finally:
        gc.callbacks.pop()
    assert under_way
    assert pauses == []
