"""Reference pages made from what they describe; see `docs/generate.py`."""

GENERATED = "<!-- Written by docs/generate.py (`make docs`): change what it describes instead. -->"


def cell(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(*rows: tuple[str, ...]) -> str:
    """A Markdown table; the first row is its head."""
    head, *body = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body]) + "\n"
