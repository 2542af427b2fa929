"""Groups of layers whose state lives equally long.

Layers that see all tokens keep the pages of a whole sequence. Layers with a window keep those of
the window. Layers that fold all tokens into a state keep one page, that of the state. So each group
has pages, page ids and page tables of its own. Those of tokens have equally many of them, and one
key names the page of each group that ends at the same token: of a state, the one that has folded in
all tokens up to there.

Group 0 keeps all tokens. Hooks, tiers, the load report and the router mean its pages by "pages".
Where no layer sees all tokens it has no layers. Its pages say then how far a sequence reaches, and
have next to no bytes (`engine.pool.kv_pool.EMPTY_HEAD_BYTES`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Full:
    """The state of all tokens is kept."""


@dataclass(frozen=True, slots=True)
class Window:
    """The state of the last tokens is kept."""

    tokens: int
    """Tokens that a position sees, with itself; at least 1."""

    def pages_before(self, page_size: int) -> int:
        """Pages before a page's border that the token behind it may read."""
        return -(-(self.tokens - 1) // page_size)

    def most_pages(self, page_size: int) -> int:
        """Most pages of a sequence that decodes. A token and the window before it touch one page
        more than `pages_before`. One more is let go only when the step that read it has settled."""
        return self.pages_before(page_size) + 2


@dataclass(frozen=True, slots=True)
class State:
    """All tokens are folded into one state."""

    grid: int
    """A prompt that is cut behind multiples of so many tokens has the same state, bit by bit, as
    one that is not. So it is cut, and states are kept for later prompts, only there."""

    def pages_before(self, page_size: int) -> int:
        """Pages before a page's border that the token behind it needs: the one with the state."""
        return 1

    def grid_pages(self, page_size: int) -> int:
        """Pages from one place where a state may be kept to the next."""
        return math.lcm(self.grid, page_size) // page_size


Kind = Full | Window | State
"""How long the state of a group lives."""


@dataclass(frozen=True, slots=True)
class Plane:
    """A part of each page of a group: what some layers keep there."""

    layers: tuple[int, ...]
    """Indices of layers in the model, in the order of the page."""
    unit_bytes: int
    """Bytes that all these layers keep in a page for one unit."""
    dtype: str
    """How its numbers are stored: a dtype's name or `fp8`."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group of a whole model, over all ranks."""

    name: str
    kind: Kind
    planes: tuple[Plane, ...]
    units: int
    """Parts of a page that ranks divide, such as KV heads."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of its layers in the model, in the order of the page."""
        return tuple(layer for plane in self.planes for layer in plane.layers)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit in a page."""
        return sum(plane.unit_bytes for plane in self.planes)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, over all ranks once."""
        return self.units * self.unit_bytes


def split_layers(
    lives: Mapping[int, int | State | None],
) -> tuple[tuple[Kind, tuple[int, ...]], ...]:
    """The groups of a model, the one of all tokens first, with the layers of each.

    Args:
        lives: by layer, the tokens that a position sees, or its state; None: all tokens.
    """
    found: dict[int | State | None, list[int]] = {None: []}
    for layer, life in lives.items():
        found.setdefault(life, []).append(layer)
    return tuple((_kind_of(life), tuple(layers)) for life, layers in found.items())


def _kind_of(life: int | State | None) -> Kind:
    if life is None:
        return Full()
    return life if isinstance(life, State) else Window(life)


def name_of(kind: Kind) -> str:
    """The name of a group of this kind, as logs and metrics have it."""
    if isinstance(kind, State):
        return "state"
    return f"window-{kind.tokens}" if isinstance(kind, Window) else "full"
