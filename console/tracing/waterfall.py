"""Draws a trace as a waterfall in the terminal: one row a span, all bars on one time axis.

Spans that contain others are thin lines, other spans are solid bars. Each process has a colour. The
details of a span stand to the right of its bar if there is room, else to the left, else below.
Without a terminal there are no colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from console.tracing.span_details import count, details, duration
from console.tracing.traces import Span, Trace, missing_spans
from telemetry.names import Attr, Service, SpanName

MAX_COLUMNS: Final = 140
_MIN_AXIS: Final = 24
_MAX_NAME: Final = 30
_DURATION: Final = 7
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_RULE: Final = "─"
_TICK: Final = "┬"
_SEPARATOR: Final = " · "
_ASCII: Final = str.maketrans("▏▎▍▌▋▊▉█▐━─┬·→✗…µ", "#########=-+,>x~u")
"""ASCII replacements of single characters, for terminals that have nothing else."""
_OTHER_COLOURS: Final = ("yellow", "blue", "bright_magenta", "bright_cyan", "bright_green")
_COLOURS: Final = {
    Service.ROUTER: "cyan",
    Service.PREFILL: "magenta",
    Service.DECODE: "green",
    Service.BOTH: "magenta",
    Service.CLIENT: "blue",
}
_FAILED: Final = "red"
_ROUND_MS: Final = tuple(
    base * 10**power for power in range(-3, 7) for base in (1, 2, 5)
)  # Possible distances of ticks.


def draw(trace: Trace) -> Waterfall:
    """Makes a waterfall that a rich console can print."""
    return Waterfall(trace)


@dataclass(frozen=True, slots=True)
class Waterfall:
    """A trace that a rich console prints as a waterfall."""

    trace: Trace

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in _lines(self.trace, min(options.max_width, MAX_COLUMNS)):
            line.rstrip()
            if options.ascii_only:
                line.plain = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
            yield line


def _lines(trace: Trace, width: int) -> Iterator[Text]:
    rows = [(depth, span) for depth, span in trace.walk()]
    columns = _Columns.fitting(rows, width)
    axis = _Axis.of(trace, columns.axis)
    colours = _colours(trace.spans)
    parents = {span.parent_id for span in trace.spans}
    yield from _title(trace, width)
    yield Text()
    yield from (columns.under_axis(line) for line in axis.ruler())
    for depth, span in rows:
        colour = _FAILED if span.failed else colours[span.process]
        start, end = axis.eighths(span)
        bar = _thin_bar(start, end) if span.id in parents else _solid_bar(start, end)
        drawn = _beside(bar, start // 8, details(span), colour, columns.axis)
        yield columns.row(depth, span, colours[span.process], next(drawn))
        yield from (columns.under_axis(line) for line in drawn)
    yield from _notes(trace, width)


def _title(trace: Trace, width: int) -> Iterator[Text]:
    """The model, the trace id and the outcome of the request."""
    request = trace.request
    attributes = request.attributes if request else {}
    name = str(attributes.get(Attr.REQUEST_MODEL, trace.spans[0].name if trace.spans else "empty"))
    room = max(8, width - len(trace.id) - 2)
    head = Text(set_cell_size(_cut(name, room), room), "bold")
    yield head.append(f"  {trace.id}", "not bold dim")
    if request is not None:
        yield from (Text(line) for line in _wrapped(_outcome(request), width))


def _outcome(request: Span) -> Iterator[str]:
    have = request.attributes
    tokens = int(have.get(Attr.OUTPUT_TOKENS, 0))
    if Attr.INPUT_TOKENS in have:
        cached = have.get(Attr.CACHED_INPUT_TOKENS)
        of_those = f" ({cached} cached)" if cached else ""
        prompt = count("prompt token")(have[Attr.INPUT_TOKENS])
        yield f"{prompt}{of_those} → {count('token')(tokens)}"
    if (first_s := have.get(Attr.RESPONSE_FIRST_TOKEN_S)) is not None:
        yield f"first token {duration(first_s * 1e9)}"
        if tokens > 1:
            yield f"{duration((request.duration_ns - first_s * 1e9) / (tokens - 1))} a token"
    yield f"{duration(request.duration_ns)} in all"
    if request.failed:
        yield request.error or "failed"


def _notes(trace: Trace, width: int) -> Iterator[Text]:
    """Notes about missing and dropped spans."""
    missing = missing_spans(trace) if trace.request else []
    if missing or trace.dropped_spans:
        yield Text()
    if missing:
        lines = _wrapped([f"not seen: {missing[0]}", *missing[1:]], width)
        yield from (Text(line, "yellow") for line in lines)
    if trace.dropped_spans:
        yield Text(f"{trace.dropped_spans} more spans found no room in the store", "yellow")


@dataclass(frozen=True, slots=True)
class _Columns:
    """Widths of the columns for name, process and axis."""

    name: int
    process: int
    axis: int

    @classmethod
    def fitting(cls, rows: Sequence[tuple[int, Span]], width: int) -> _Columns:
        """Chooses the widths. The axis gets the room beside the names."""
        names = (cell_len(_indented(depth, span)) for depth, span in rows)
        name = min(_MAX_NAME, max(names, default=0))
        process = max((cell_len(_process(span)) for _, span in rows), default=0)
        axis = width - name - process - _DURATION - 5
        if axis < _MIN_AXIS:
            name = max(12, name - (_MIN_AXIS - axis))
        return cls(name, process, max(_MIN_AXIS, axis))

    def row(self, depth: int, span: Span, colour: str, drawn: Text) -> Text:
        """The line of one span."""
        name = set_cell_size(_cut(_indented(depth, span), self.name), self.name)
        line = Text(name, _FAILED if span.failed else "")
        line.append(f"  {_process(span):<{self.process}}", f"not bold {colour}")
        line.append(f" {duration(span.duration_ns):>{_DURATION}}  ")
        return line.append_text(drawn)

    def under_axis(self, drawn: Text) -> Text:
        """A line that is empty outside of the axis."""
        return Text(" " * (self.name + self.process + _DURATION + 5)).append_text(drawn)


def _indented(depth: int, span: Span) -> str:
    name = span.name.rsplit("/", 1)[-1] if span.kind == "server" else span.name
    if SpanName.is_request(name):
        name = name.split(" ")[0]  # The title has the model.
    return "  " * depth + name


def _process(span: Span) -> str:
    """Name of the process. A leg shows its worker, though the router writes the leg's span: of a
    lost worker there may be no other span."""
    return str(span.attributes.get(Attr.WORKER_ID) or span.process)


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps time to columns."""

    start_ns: int
    duration_ns: int
    columns: int

    @classmethod
    def of(cls, trace: Trace, columns: int) -> _Axis:
        """An axis from the first span's start to the last one's end."""
        return cls(trace.start_ns, max(1, trace.end_ns - trace.start_ns), columns)

    def eighths(self, span: Span) -> tuple[int, int]:
        """Start and end of a span's bar in eighths of a column; never empty, never outside."""
        last = self.columns * 8
        start = min(last - 1, self._eighth(span.start_ns))
        return start, min(last, max(start + 1, self._eighth(span.end_ns)))

    def ruler(self) -> Iterator[Text]:
        """Yields a line of round times and a line of ticks."""
        apart_ns = self._apart_ns()
        labels, ticks = Text(style="dim"), Text(style="dim")
        for number in range(self.duration_ns // apart_ns + 1):
            at = number * apart_ns * self.columns // self.duration_ns
            label = _tick(number * apart_ns, self.duration_ns)
            if at + cell_len(label) > self.columns:
                break
            labels.append(" " * (at - len(labels))).append(label)
            ticks.append(_RULE * (at - len(ticks))).append(_TICK)
        ticks.append(_RULE * (self.columns - len(ticks)))
        yield labels
        yield ticks

    def _eighth(self, at_ns: int) -> int:
        return (at_ns - self.start_ns) * self.columns * 8 // self.duration_ns

    def _apart_ns(self) -> int:
        """The smallest round distance of ticks that leaves room for their labels."""
        room_ns = self.duration_ns * 11 / self.columns
        return int(next((ms for ms in _ROUND_MS if ms * 1e6 >= room_ns), _ROUND_MS[-1]) * 1e6)


def _solid_bar(start: int, end: int) -> str:
    """A solid bar, from its first column on. Start and end are in eighths of a column."""
    first, last = start // 8, -(-end // 8)
    if last - first == 1:
        return _EIGHTHS[end - start] if start % 8 < 4 else "▐"
    head = "█" if start % 8 < 4 else "▐"
    return head + "█" * (last - first - 2) + _EIGHTHS[end - (last - 1) * 8]


def _thin_bar(start: int, end: int) -> str:
    """A thin bar, for a span that contains others."""
    return "━" * (-(-end // 8) - start // 8)


def _beside(bar: str, start: int, details: Sequence[str], colour: str, room: int) -> Iterator[Text]:
    """Yields a line with the bar and its details, and further lines if details go below."""
    drawn = Text(" " * start).append(bar, colour)
    label = _SEPARATOR.join(details)
    if not label:
        yield drawn
    elif start + len(bar) + 1 + cell_len(label) <= room:
        yield drawn.append(f" {label}", "dim")
    elif cell_len(label) + 1 <= start:
        yield (
            Text(" " * (start - cell_len(label) - 1)).append(f"{label} ", "dim").append(bar, colour)
        )
    else:
        yield drawn
        for line in _wrapped(details, room):
            at = max(0, min(start, room - cell_len(line)))
            yield Text(" " * at).append(line, "dim")


def _wrapped(parts: Iterable[str], room: int) -> Iterator[str]:
    line = ""
    for part in parts:
        joined = f"{line}{_SEPARATOR}{part}" if line else part
        if line and cell_len(joined) > room:
            yield line
            joined = part
        line = _cut(joined, room)
    yield line


def _cut(text: str, room: int) -> str:
    return text if cell_len(text) <= room else set_cell_size(text, room - 1) + "…"


def _tick(at_ns: int, duration_ns: int) -> str:
    """Writes the label of a tick, in a unit that fits the axis's length."""
    if duration_ns < 2e6:
        return f"{at_ns / 1e3:g} µs"
    return f"{at_ns / 1e6:g} ms" if duration_ns < 2e9 else f"{at_ns / 1e9:g} s"


def _colours(spans: Iterable[Span]) -> dict[str, str]:
    """Colours by process. Processes of one service share its colour."""
    services = dict.fromkeys(span.service for span in spans)
    others = (service for service in services if service not in _COLOURS)
    palette = _COLOURS | {
        service: _OTHER_COLOURS[number % len(_OTHER_COLOURS)]
        for number, service in enumerate(others)
    }
    return {span.process: palette[span.service] for span in spans}
