"""Makes the reference pages; see `docs/generate.py`."""

GENERATED = "<!-- Written by docs/generate.py (`make docs`): change what it describes instead. -->"


def cell(text: str) -> str:
    """Escapes text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(*rows: tuple[str, ...]) -> str:
    """Writes a Markdown table. The first row is its head."""
    head, *body = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"
