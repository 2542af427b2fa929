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
    yield
    gc.unfreeze()


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
