"""Charts of a report as Vega-Lite specifications: plain dictionaries, their rows in columns. Torch-free; any process.

Colours are CSS variables of the page, so that one drawing is right on a light page, a dark one and paper.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moerl.diagnostics.colors import PALETTE, colors_of
from moerl.diagnostics.report.thinning import thinned_points

COLORS = tuple(f"var(--c{number})" for number in range(8))
"""Colours of `PALETTE` as CSS variables, whose values the theme of the page sets."""
HEAT = tuple(f"var(--h{number})" for number in range(7))
HEAT_STEPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
"""Shares at which the colour of a heat map changes; the same on every page, so that pages can be compared."""
HEAT_BANDS = ("to 0.1%", "to 0.3%", "to 1%", "to 3%", "to 10%", "to 30%", "above 30%")
MAX_POINTS, MAX_ALL_POINTS = 400, 60_000
"""Points of one curve, and of all curves of a page."""
MAX_COLUMNS, MAX_CELLS = 96, 24_000
"""Columns of a heat map, and cells of all maps of a page."""

CONFIG: dict[str, Any] = {
    "background": None,
    "aria": False,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--quiet)",
        "titleColor": "var(--quiet)",
        "gridColor": "var(--grid)",
        "domainColor": "var(--line)",
        "tickColor": "var(--line)",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 260,
    },
    "legend": {
        "labelColor": "var(--ink)",
        "titleColor": "var(--quiet)",
        "orient": "top",
        "labelFontSize": 12.5,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelLimit": 420,
        "symbolStrokeWidth": 2,
        "columns": {"signal": "width < 560 ? 1 : width < 900 ? 2 : 4"},
    },
    "range": {"category": list(COLORS)},
}
"""Vega-Lite configuration of all charts."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a chart's data table."""

    key: str
    """Key of the rows."""
    title: str
    """Heading of the column."""
    form: str = "number"
    """Form of its values: "number", "percent" or "text"."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One drawing."""

    label: str
    """Name in the list of choices."""
    caption: str
    """One sentence that says what the drawing shows, and stands for it."""
    spec: dict[str, Any]
    """Vega-Lite specification without data."""
    blocks: tuple[dict[str, Any], ...]
    """Rows, block by block: for each key a list of values, or one value that all rows of the block have."""
    columns: tuple[Column, ...]
    """Columns of the table of its rows."""
    group: str = ""
    """Heading of neighbours in the list of choices; empty: none."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of the page: one drawing of several, chosen by hand."""

    name: str
    """Unique on its page."""
    choices: tuple[Choice, ...]
    """At least one; the first is shown until another is chosen."""
    ask: str = ""
    """Label of the list of choices ("metric"), which is shown for several choices only."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: values at xs."""

    name: str
    """Name in the legend."""
    xs: Sequence[float]
    """[n]."""
    ys: Sequence[float]
    """[n]."""
    color: str = COLORS[0]
    """Colour as of `page_colors`."""


@dataclass(frozen=True, slots=True)
class LineStyle:
    """Axes of a chart of lines."""

    x_title: str
    """Title of the horizontal axis."""
    y_title: str
    """Title of the vertical axis, with the unit."""
    percent: bool = False
    """True: values are shares in [0, 1]."""
    from_zero: bool = False
    """True: the vertical axis begins at zero, and is never logarithmic."""
    height: int = 300
    """Pixels."""


def short(values: Sequence[float] | NDArray[np.float64]) -> list[float]:
    """Returns the values with five significant digits, more than a drawing can show."""
    return [float(f"{value:.5g}") for value in values]


def page_colors(keys: Iterable[str]) -> dict[str, str]:
    """Returns the page's colour of each key (`colors_of`)."""
    return {key: COLORS[PALETTE.index(color)] for key, color in colors_of(keys).items()}


def band_of(share: float) -> str:
    """Returns the name of a share's colour in a heat map."""
    return HEAT_BANDS[bisect.bisect_left(HEAT_STEPS, share)]


def tooltip(*shown: tuple[str, ...]) -> list[dict[str, str]]:
    """Returns a tooltip. shown: of each line the field, its title and, of some, its format."""
    return [dict(zip(("field", "title", "format"), each, strict=False)) for each in shown]


def _channel(field: str, kind: str, **more: Any) -> dict[str, Any]:
    """Returns how a field of the rows is drawn. kind: "quantitative", "ordinal" or "nominal". more: title, axis, ..."""
    return {"field": field, "type": kind, **more}


def steps_axis(title: str) -> dict[str, Any]:
    """Returns the horizontal axis of whole numbers; rows: x."""
    axis, scale = {"tickMinStep": 1, "grid": False}, {"zero": False, "nice": False}
    return _channel("x", "quantitative", title=title, axis=axis, scale=scale)


def _drawing(height: int, mark: dict[str, Any], **channels: Any) -> dict[str, Any]:
    """Returns the specification of a drawing that is as wide as its place. height: pixels. channels: its encoding."""
    return {"width": "container", "height": height, "mark": mark, "encoding": channels}


def points_of(most: int) -> dict[str, Any] | bool:
    """Returns the marks of the points of curves, of which the longest has so many; False for no marks."""
    return {"size": 28, "filled": True} if most <= 60 else False


def series_colors(colors: Mapping[str, str], legend: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the colours of series, with a legend. colors: by series, in order."""
    scale = {"domain": [*colors], "range": [*colors.values()]}
    return _channel("series", "nominal", scale=scale, legend=legend)


def lines(
    curves: Sequence[Curve], style: LineStyle, limit: int = MAX_POINTS
) -> tuple[dict[str, Any], tuple[dict[str, Any], ...]]:
    """Returns the specification and the rows of curves over a number, each of at most `limit` points."""
    values = [y for curve in curves for y in curve.ys]
    from_zero = style.percent or style.from_zero
    is_log = not from_zero and min(values) > 0.0 and max(values) > 20.0 * min(values)
    parts: list[tuple[str, list[float], list[float]]] = []
    for curve in curves:
        points = thinned_points(curve.ys, limit)
        parts.append((curve.name, [curve.xs[at] for at in points], [curve.ys[at] for at in points]))
    y_axis = (
        {"format": ".3~%"} if style.percent else {"format": ".1e"} if is_log or max(map(abs, values)) < 1e-3 else {}
    )
    domain = [curve.name for curve in curves]
    # The same legend for both, or Vega-Lite complains that they conflict.
    legend = None if len(domain) == 1 else {"title": None, "symbolType": "stroke", "symbolSize": 260}
    dashes = [_DASHES[number % len(_DASHES)] for number in range(len(domain))]
    y_scale = {"type": "log"} if is_log else {"zero": from_zero}
    spec = _drawing(
        style.height,
        {"type": "line", "point": points_of(max(len(xs) for _, xs, _ in parts))},
        x=steps_axis(style.x_title),
        y=_channel("y", "quantitative", title=style.y_title, axis=y_axis, scale=y_scale),
        color=series_colors({curve.name: curve.color for curve in curves}, legend),
        strokeDash=_channel("series", "nominal", scale={"domain": domain, "range": dashes}, legend=legend),
        tooltip=tooltip(("x", style.x_title), ("y", "value", ".4~%" if style.percent else ".4~g"), ("series", "curve")),
    )
    return spec, tuple({"series": name, "x": short(xs), "y": short(ys)} for name, xs, ys in parts)


_DASHES = [[1, 0], [6, 3], [2, 2], [9, 3, 2, 3]]


def stacked(num_bars: int, colors: Mapping[str, str]) -> dict[str, Any]:
    """Returns horizontal bars of parts; rows: bar, series, nats, order. colors: of each part, in their order."""
    return _drawing(
        50 * num_bars,
        {"type": "bar", "height": 26, "stroke": "var(--page)", "strokeWidth": 1},
        y=_channel("bar", "nominal", title=None, sort=None),
        x=_channel("nats", "quantitative", title="mean |d|, nats", stack="zero"),
        color=series_colors(colors, {"title": None, "symbolType": "square"}),
        order=_channel("order", "quantitative"),
        tooltip=tooltip(("bar", "gap"), ("series", "part"), ("nats", "nats", ".4~g")),
    )


def _column_axis(title: str) -> dict[str, Any]:
    axis = {"labelOverlap": "parity", "labelBound": 5, "labelAngle": 0, "labelSeparation": 6}
    return _channel("column", "ordinal", title=title, sort=None, axis=axis)


def layer_bars(x_title: str, largest: float) -> dict[str, Any]:
    """Returns bars of one layer by column; rows: column, share. largest: share of them."""
    scale = {"domainMin": 0.0} | ({} if largest else {"domainMax": 0.01})
    return _drawing(
        160,
        {"type": "bar", "color": HEAT[4]},
        x=_column_axis(x_title),
        y=_channel("share", "quantitative", title="rows with other experts", axis={"format": ".3~%"}, scale=scale),
        tooltip=tooltip(("column", x_title), ("share", "differing", ".4~%")),
    )


def heat(num_layers: int, x_title: str) -> dict[str, Any]:
    """Returns rectangles by layer and column; rows: layer, column, share, band (`band_of`)."""
    bands = {"domain": [*HEAT_BANDS], "range": [*HEAT]}
    legend = {"symbolType": "square", "symbolSize": 180, "columns": {"signal": "width < 560 ? 2 : 7"}}
    spec = _drawing(
        max(120, min(640, 26 * num_layers)),
        {"type": "rect"},
        x=_column_axis(x_title),
        y=_channel("layer", "ordinal", title="MoE layer", sort=None, axis={"labelOverlap": "parity"}),
        color=_channel("band", "ordinal", title="rows with other experts", scale=bands, legend=legend),
        tooltip=tooltip(("layer", "MoE layer"), ("column", x_title), ("share", "other experts", ".4~%")),
    )
    return spec | {"config": {"scale": {"bandPaddingInner": 0, "bandPaddingOuter": 0}}}


def grouped(x_title: str, domain: Sequence[str]) -> dict[str, Any]:
    """Returns bars side by side in bins; rows: series, bin, count, share. domain: the series."""
    legend = None if len(domain) == 1 else {"title": None, "symbolType": "square"}
    x_axis = {"labelOverlap": "parity", "labelBound": 5, "labelAngle": 0}
    shown = [*tooltip(("series",), ("bin", x_title), ("count", "rows", ",")), {"field": "share", "format": ".3~%"}]
    return _drawing(
        240,
        {"type": "bar"},
        x=_channel("bin", "ordinal", title=x_title, sort=None, axis=x_axis),
        xOffset=_channel("series", "nominal", sort=[*domain]),
        y=_channel("share", "quantitative", title="share of rows", axis={"format": ".3~%"}),
        color=series_colors(page_colors(domain), legend),
        tooltip=shown,
    )


def ranges(x_title: str, num_rows: int) -> dict[str, Any]:
    """Returns points with intervals by name; rows: name, value, low, high."""
    form = ".3~g"
    numbers = [{"field": key, "format": form} for key in ("value", "low", "high")]
    x = _channel("low", "quantitative", title=x_title, axis={"format": form})
    point = {"type": "point", "filled": True, "size": 70, "opacity": 1, "color": COLORS[0]}
    return {
        "width": "container",
        "height": 24 * num_rows + 16,
        "encoding": {"y": _channel("name", "nominal", title=None, sort=None), "tooltip": [{"field": "name"}, *numbers]},
        "layer": [
            {
                "mark": {"type": "rule", "strokeWidth": 2, "color": COLORS[0]},
                "encoding": {"x": x, "x2": {"field": "high"}},
            },
            {"mark": point, "encoding": {"x": _channel("value", "quantitative")}},
        ],
    }
