"""Keys of the pages of requests (`prefixes.keys`), and news of the pages that have keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.bounds import Bounds
from engine.pages.blocks import BlockManager
from engine.pages.watch import CacheEventKind, CacheEvents
from engine.types import Request, TokenIds
from prefixes.index import GONE, GROUP
from prefixes.keys import page_keys, salt_of

ReportPages = Callable[[int, Sequence[bytes]], None]
"""Hears that the pages of some keys came to a tier (`prefixes.index`: POOL, HOST), or left it (with
GONE added), of a group (with GROUP added for each before it). Called on the step loop's thread;
must return at once."""


def report_pages(blocks: BlockManager, tier: int, report: ReportPages, group: int = 0) -> None:
    """Reports all pages of a group that have keys, and then each change."""
    here = tier + GROUP * group
    gone = here | GONE

    def came(events: CacheEvents) -> None:
        report(here, events.keys)

    def left(events: CacheEvents) -> None:
        report(gone, events.keys)

    report(here, blocks.keys)
    blocks.subscribe(came, (CacheEventKind.STORED,))
    blocks.subscribe(left, (CacheEventKind.EVICTED,))


def request_keys(
    config: Bounds, request: Request, tokens: TokenIds, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the complete pages of `tokens`, which begin a sequence of a request. `known` is as
    for `page_keys`."""
    salt = salt_of(config.kv_precision, request.cache_salt, request.adapter)
    return page_keys(tokens, config.page_size, salt, known)


def prompt_keys(
    config: Bounds, request: Request, tokens: TokenIds, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Keys of the pages of `tokens` that may be found in the cache. `tokens` is a request's prompt
    with its output so far. At least one token is left to compute. `known` is as for `page_keys`."""
    if not config.prefix_cache or request.reads_whole_prompt:
        return []
    complete = (len(tokens) - 1) // config.page_size
    if len(known) >= complete:  # The usual case for a request that waits.
        return list(known[:complete])
    return request_keys(config, request, tokens[:-1], known)
