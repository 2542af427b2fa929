"""Opens hooks by their names: `NAME` or `NAME?option=value&option=value`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final
from urllib.parse import parse_qsl

from engine.pool.kv_pool import KvPool
from engine.step.hooks import AttentionHook, Hook, HookError, HookSite

HOOKS: Final = "baton.hooks"
ATTENTION: Final = "baton.attention"
"""Entry points of hooks, and of those that are called in each layer."""
MakeHook = Callable[[Mapping[str, str]], Hook]
"""Makes a hook from its options. Raises HookError for those that it does not know or allow."""


def open_hooks(wanted: Sequence[str]) -> list[Hook]:
    """Makes hooks, in the order given.

    Raises:
        HookError: one is not installed, cannot be made with its options, or is named twice, or two
            of them choose pages.
    """
    hooks = [_open(spec) for spec in wanted]
    names = [hook.name for hook in hooks]
    for name in names:
        if names.count(name) > 1:
            raise HookError(f"hook {name} is named twice")
    choosing = [hook.name for hook in attention_hooks(hooks) if hook.chooses_pages]
    if len(choosing) > 1:
        raise HookError(f"{' and '.join(choosing)} both choose pages: use one of them")
    return hooks


def attention_hooks(hooks: Sequence[Hook]) -> list[AttentionHook]:
    """Hooks that are called in each layer."""
    return [hook for hook in hooks if isinstance(hook, AttentionHook)]


def attach(hooks: Sequence[Hook], site: HookSite) -> None:
    """Attaches hooks to a rank.

    Raises:
        HookError: one cannot work there.
    """
    for hook in hooks:
        try:
            hook.attach(site)
        except HookError:
            raise
        except Exception as error:
            raise HookError(f"hook {hook.name} cannot be attached: {error}") from error


def bytes_beside(hooks: Sequence[Hook], pool: KvPool) -> int:
    """Memory that hooks take beside each page of such a pool.

    Raises:
        HookError: one cannot say.
    """
    total = 0
    for hook in hooks:
        try:
            total += max(0, operator.index(hook.page_bytes(pool)))
        except Exception as error:
            words = f"hook {hook.name} cannot say what it takes beside a page: "
            raise HookError(f"{words}{type(error).__name__}: {error}") from error
    return total


def _open(spec: str) -> Hook:
    name, _, query = spec.partition("?")
    point = _find(name)
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        make: MakeHook = point.load()
        hook = make(options)
    except HookError:
        raise
    except Exception as error:
        raise HookError(f"hook {name} cannot be made: {type(error).__name__}: {error}") from error
    kind = AttentionHook if point.group == ATTENTION else Hook
    if not isinstance(hook, kind):
        raise HookError(f"hook {name} is installed as {point.group} and is no {kind.__name__}")
    hook.name = name
    return hook


def _find(name: str) -> EntryPoint:
    points: list[EntryPoint] = [*entry_points(group=HOOKS), *entry_points(group=ATTENTION)]
    for point in points:
        if point.name == name:
            return point
    known = sorted({point.name for point in points})
    there = f"there are {', '.join(known)}" if known else "no package with hooks is"
    raise HookError(f"hook {name} is not installed; {there}")
