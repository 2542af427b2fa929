"""Reads traces of real traffic: arrival times, lengths, shared prefixes."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

from console.loadgen.errors import WrongUseError

BLOCK_TOKENS: Final = 512
"""Tokens in a block of a Mooncake trace."""
_FOLDER: Final = Path(__file__).parent / "traces"
BUILT_IN: Final[Mapping[str, Path]] = {
    "azure-conversation": _FOLDER / "azure_conversation_2023.csv.gz",
    "mooncake-conversation": _FOLDER / "mooncake_conversation_head.jsonl.gz",
}
"""Traces that come with Baton. Their README names their sources."""


class TraceRow(NamedTuple):
    """One request of a trace."""

    at_s: float
    """Arrival, seconds after the first request."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """One id for each `BLOCK_TOKENS` of the prompt. Prompts with equal first ids share a prefix.
    Empty: prefixes are unknown."""


def read_trace(name: str) -> tuple[TraceRow, ...]:
    """Reads a trace that comes with Baton, by name, or a file.

    A `.csv` file has the form of Azure's trace, a `.jsonl` file that of Mooncake's. Both may be
    gzipped.

    Raises:
        WrongUseError: there is no such file, or it is not a trace.
    """
    path = BUILT_IN.get(name, Path(name))
    form = path.name.removesuffix(".gz").rpartition(".")[2]
    if form not in _READERS:
        known = ", ".join(BUILT_IN)
        raise WrongUseError(f"{name} is no trace: neither one of {known} nor a .csv or .jsonl file")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            rows = list(_READERS[form](file))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise WrongUseError(f"cannot read the trace {path}: {why}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise WrongUseError(
            f"{path} is not the {form} trace that it seems to be: {error!r}"
        ) from None
    if not rows:
        raise WrongUseError(f"the trace {path} is empty")
    rows.sort(key=lambda row: row.at_s)
    return tuple(row._replace(at_s=row.at_s - rows[0].at_s) for row in rows)


def _azure(lines: Iterable[str]) -> Iterable[TraceRow]:
    for record in csv.DictReader(lines):
        yield _checked(
            TraceRow(
                _unix_s(record["TIMESTAMP"]),
                int(record["ContextTokens"]),
                int(record["GeneratedTokens"]),
            )
        )


def _unix_s(timestamp: str) -> float:
    """Unix seconds of a timestamp. It may have seven decimals, one more than Python reads."""
    whole, _, fraction = timestamp.partition(".")
    return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")


def _mooncake(lines: Iterable[str]) -> Iterable[TraceRow]:
    for line in lines:
        if line.strip():
            record = json.loads(line)
            yield _checked(
                TraceRow(
                    float(record["timestamp"]) / 1e3,
                    int(record["input_length"]),
                    int(record["output_length"]),
                    tuple(map(int, record.get("hash_ids", ()))),
                )
            )


def _checked(row: TraceRow) -> TraceRow:
    if row.prompt_tokens < 1 or row.output_tokens < 1:
        raise ValueError(f"a request of {row.prompt_tokens} + {row.output_tokens} tokens")
    if row.blocks and len(row.blocks) * BLOCK_TOKENS < row.prompt_tokens:
        raise ValueError(f"{len(row.blocks)} blocks for {row.prompt_tokens} tokens")
    return row


_READERS: Final[Mapping[str, Callable[[Iterable[str]], Iterable[TraceRow]]]] = {
    "csv": _azure,
    "jsonl": _mooncake,
}
