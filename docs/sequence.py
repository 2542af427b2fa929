"""Sequence diagrams as SVG: the part of mermaid's language that these pages use, drawn while the
site is built, so that a page needs neither a script nor a network to show one.

    participant P as prefill worker
    P->>D: solid arrow        P-->>D: dashed, an answer
    P-)D: open head: sent without waiting      D--)P: the same, dashed
    P->>P: something that P does by itself
    Note over D: a remark        loop every chunk ... end

1. `parse` turns the text into rows, top to bottom; a line that it does not know is an error.
2. `_columns` places the participants so far apart that every text between them fits.
3. `draw` walks down the rows. Colours are the page's own, so light and dark both work.
"""

from __future__ import annotations

import html
import itertools
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pymdownx.superfences import SuperFencesException

CHAR_PX: Final = 7.3
"""Mean width of a character of 13 px."""
LINE_PX: Final = 17
WRAP_CHARS: Final = 30
HEAD_PX: Final = 34
PAD_PX: Final = 12

_PARTICIPANT: Final = re.compile(r"participant (\w+) as (.+)")
_MESSAGE: Final = re.compile(r"(\w+?)\s*(--?(?:>>|\)))\s*(\w+): (.+)")
_NOTE: Final = re.compile(r"Note over (\w+): (.+)")
_LOOP: Final = re.compile(r"loop (.+)")


class Row(NamedTuple):
    """One event. `kind` is "message", "self", "note", "loop" or "end"."""

    kind: str
    source: int = 0
    target: int = 0
    arrow: str = ""
    lines: tuple[str, ...] = ()

    @property
    def text_px(self) -> float:
        """Width of the longest line."""
        return max(map(len, self.lines), default=0) * CHAR_PX


@dataclass
class Diagram:
    """What was parsed: labels of the participants, left to right, and rows."""

    labels: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def fence(source: str, *_: Any, **__: Any) -> str:
    """What a fenced block of the language `mermaid` becomes."""
    return draw(parse(source))


def parse(source: str) -> Diagram:
    """Reads a diagram.

    Raises:
        SuperFencesException: a line is none of what the module's docstring shows.
    """
    first, *lines = [line.strip() for line in source.strip().splitlines()]
    if first != "sequenceDiagram":
        raise SuperFencesException(f"no sequence diagram: {first}")
    diagram, columns = Diagram(), {}
    for line in lines:
        if found := _PARTICIPANT.fullmatch(line):
            columns[found[1]] = len(diagram.labels)
            diagram.labels.append(found[2])
        else:
            diagram.rows.append(_row(line, columns))
    return diagram


def _row(line: str, columns: dict[str, int]) -> Row:
    try:
        if found := _MESSAGE.fullmatch(line):
            source, target = columns[found[1]], columns[found[3]]
            kind = "self" if source == target else "message"
            return Row(kind, source, target, found[2], _wrap(found[4]))
        if found := _NOTE.fullmatch(line):
            column = columns[found[1]]
            return Row("note", column, column, "", _wrap(found[2]))
    except KeyError as unknown:
        raise SuperFencesException(f"no such participant: {unknown}") from None
    if found := _LOOP.fullmatch(line):
        return Row("loop", lines=(f"loop: {found[1]}",))
    if line == "end":
        return Row("end")
    raise SuperFencesException(f"not understood: {line}")


def _wrap(text: str) -> tuple[str, ...]:
    return tuple(textwrap.wrap(text, WRAP_CHARS))


def _columns(diagram: Diagram) -> tuple[list[float], float]:
    """Centres of the participants, and the width of it all."""
    count = len(diagram.labels)
    boxes = [len(label) * CHAR_PX + 2 * PAD_PX for label in diagram.labels]
    left, right = boxes[0] / 2, boxes[-1] / 2
    gaps = [(one + two) / 2 + PAD_PX for one, two in itertools.pairwise(boxes)]
    for row in diagram.rows:
        low, high = sorted((row.source, row.target))
        if row.kind == "message":
            each = (row.text_px + 2 * PAD_PX) / (high - low)
            gaps[low:high] = [max(gap, each) for gap in gaps[low:high]]
            continue
        after = row.text_px + 40 if row.kind == "self" else row.text_px / 2 + 2 * PAD_PX
        before = row.text_px / 2 + 2 * PAD_PX if row.kind == "note" else 0.0
        if low + 1 < count:
            gaps[low] = max(gaps[low], after)
        else:
            right = max(right, after)
        if low:
            gaps[low - 1] = max(gaps[low - 1], before)
        else:
            left = max(left, before)
    centres = [left + 2 * PAD_PX + sum(gaps[:index]) for index in range(count)]
    return centres, centres[-1] + right + 2 * PAD_PX


def draw(diagram: Diagram) -> str:
    """The diagram as one inline SVG."""
    x, width = _columns(diagram)
    parts: list[str] = []
    y = HEAD_PX + 2.0 * PAD_PX
    loops: list[float] = []
    for row in diagram.rows:
        if row.kind == "loop":
            parts.append(_text(2 * PAD_PX, y + LINE_PX, row.lines, "start", "loop"))
            loops.append(y)
            y += LINE_PX + PAD_PX
        elif row.kind == "end":
            top = loops.pop()
            size = f'width="{width - 2 * PAD_PX:.0f}" height="{y - top:.0f}"'
            parts.append(f'<rect class="loop" x="{PAD_PX}" y="{top:.0f}" {size} rx="4"/>')
            y += PAD_PX
        else:
            shape, y = _SHAPES[row.kind](row, x, y)
            parts.append(shape)
    lifelines = "".join(
        f'<line class="life" x1="{at:.0f}" y1="{HEAD_PX}" x2="{at:.0f}" y2="{y:.0f}"/>' for at in x
    )
    heads = "".join(map(_head, x, diagram.labels))
    said = html.escape(" - ".join(diagram.labels))
    box = f'viewBox="0 0 {width:.0f} {y + PAD_PX:.0f}" style="width:{width:.0f}px"'
    return (
        f'<figure class="sequence"><svg {box} role="img" aria-label="Sequence: {said}">'
        f"{lifelines}{heads}{''.join(parts)}</svg></figure>"
    )


def _head(at: float, label: str) -> str:
    width = len(label) * CHAR_PX + 2 * PAD_PX
    size = f'width="{width:.0f}" height="28"'
    box = f'<rect class="head" x="{at - width / 2:.0f}" y="2" {size} rx="4"/>'
    return box + _text(at, 21, (label,), "middle", "name")


def _message(row: Row, x: list[float], y: float) -> tuple[str, float]:
    """Text above an arrow."""
    start, end = x[row.source], x[row.target]
    below = y + LINE_PX * len(row.lines) + 6
    text = _text((start + end) / 2, y + LINE_PX - 3, row.lines, "middle")
    sign = 1 if end > start else -1
    style = "answer" if row.arrow.startswith("--") else "call"
    ends = f'x1="{start:.0f}" y1="{below:.0f}" x2="{end:.0f}" y2="{below:.0f}"'
    shaft = f'<line class="{style}" {ends}/>'
    return text + shaft + _arrowhead(end, below, sign, row.arrow), below + PAD_PX


def _arrowhead(at: float, y: float, sign: int, arrow: str) -> str:
    kind = "tip" if arrow.endswith(">>") else "open"
    back = at - 9 * sign
    points = f"{back:.0f},{y - 5:.0f} {at:.0f},{y:.0f} {back:.0f},{y + 5:.0f}"
    return f'<polyline class="{kind}" points="{points}"/>'


def _self(row: Row, x: list[float], y: float) -> tuple[str, float]:
    """A short arrow that comes back, its text on the right."""
    at, top = x[row.source], y + 4
    bottom = top + max(16, LINE_PX * len(row.lines))
    path = f"M{at:.0f} {top:.0f}h22V{bottom:.0f}h-22"
    text = _text(at + 30, top + LINE_PX - 4, row.lines, "start")
    shape = f'<path class="call" d="{path}"/>{_arrowhead(at, bottom, -1, ">>")}{text}'
    return shape, bottom + PAD_PX


def _note(row: Row, x: list[float], y: float) -> tuple[str, float]:
    width, height = row.text_px + 2 * PAD_PX, LINE_PX * len(row.lines) + 10
    at = x[row.source]
    size = f'width="{width:.0f}" height="{height}"'
    box = f'<rect class="note" x="{at - width / 2:.0f}" y="{y:.0f}" {size} rx="3"/>'
    return box + _text(at, y + LINE_PX, row.lines, "middle"), y + height + PAD_PX


_SHAPES: Final = {"message": _message, "self": _self, "note": _note}


def _text(x: float, y: float, lines: tuple[str, ...], anchor: str, style: str = "said") -> str:
    spans = "".join(
        f'<tspan x="{x:.0f}" y="{y + LINE_PX * index:.0f}">{html.escape(line)}</tspan>'
        for index, line in enumerate(lines)
    )
    return f'<text class="{style}" text-anchor="{anchor}">{spans}</text>'
