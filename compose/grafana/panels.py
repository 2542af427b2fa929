"""Converts a short description of a panel to Grafana's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

DATASOURCE: Final = {"type": "prometheus", "uid": "prometheus"}
GRID_COLUMNS: Final = 24

Query = tuple[str, str]
"""PromQL and a legend; {{label}} stands for a label."""


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str
    queries: Sequence[Query]
    unit: str = "short"
    help: str = ""
    kind: str = "timeseries"
    exemplars: bool = False
    stacked: bool = False
    limit: float | None = None
    """Value of a red line, in the panel's unit."""
    width: int = 12
    height: int = 8


def quantiles(metric: str, by: str = "", *, of: Sequence[int] = (50, 90, 99)) -> list[Query]:
    """Makes queries of a histogram's percentiles, one for each value of the label `by`."""
    labels = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return [
        (
            f"histogram_quantile({q / 100}, sum by ({labels}) (rate({metric}_bucket[1m])))",
            f"p{q}{legend}",
        )
        for q in of
    ]


def rate(metric: str, *by: str) -> Query:
    """Makes a query of a counter's rate, by labels."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    return f"sum by ({', '.join(by)}) (rate({metric}_total[1m]))", legend


def stat(title: str, query: str, unit: str = "short", legend: str = "") -> Panel:
    """Makes a panel with one number."""
    return Panel(title, [(query, legend)], unit, kind="stat", width=4, height=4)


def dashboard(uid: str, title: str, panels: Sequence[Panel]) -> dict[str, Any]:
    """Makes a dashboard in Grafana's form."""
    return {
        "uid": f"baton-{uid}",
        "title": title,
        "tags": ["baton"],
        "schemaVersion": 39,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "graphTooltip": 1,
        "links": [
            {"type": "dashboards", "tags": ["baton"], "asDropdown": False, "includeVars": True}
        ],
        "panels": [_panel(panel, at) for panel, at in zip(panels, _places(panels), strict=True)],
    }


def _places(panels: Sequence[Panel]) -> list[dict[str, int]]:
    """Places panels from left to right, then down. The highest panel sets a row's height."""
    places, x, y, row_height = [], 0, 0, 0
    for panel in panels:
        if x + panel.width > GRID_COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        row_height = max(row_height, panel.height)
        places.append({"x": x, "y": y, "w": panel.width, "h": panel.height})
        x += panel.width
    return places


def _panel(panel: Panel, at: dict[str, int]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "id": 100 * at["y"] + at["x"] + 1,
        "title": panel.title,
        "description": panel.help,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "targets": [_target(panel, number) for number in range(len(panel.queries))],
    }
    if panel.kind == "timeseries":
        made["options"] = {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}}
    return made


def _defaults(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.unit == "percentunit":
        found["max"] = 1
    if panel.limit is not None:
        steps = [{"color": "transparent", "value": None}, {"color": "red", "value": panel.limit}]
        found["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        found["custom"] = {
            "fillOpacity": 25 if panel.stacked else 0,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "off" if panel.limit is None else "line"},
            "showPoints": "never",
        }
    return found


def _target(panel: Panel, number: int) -> dict[str, Any]:
    expression, legend = panel.queries[number]
    target = {
        "refId": chr(ord("A") + number),
        "datasource": DATASOURCE,
        "expr": expression,
        "legendFormat": legend,
        "exemplar": panel.exemplars,
    }
    if panel.kind == "heatmap":
        target["format"] = "heatmap"
    return target
