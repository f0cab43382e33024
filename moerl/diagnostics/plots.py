"""PNG curves of a run, drawn from its `metrics.jsonl`. Torch-free; matplotlib is imported when something is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moerl.diagnostics.colors import EVALUATION, NOTHING_KEPT, REST, ROLLOUTS, TRAINED
from moerl.telemetry.sinks import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET, GRID = "#1f2933", "#66727f", "#e4e7eb"
OVERVIEW_FILE = "curves.png"


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: a metric of a stage."""

    stage: str
    """Stage of the rows that it is drawn from."""
    metric: str
    """Name of the metric in `metrics.jsonl`."""
    label: str
    """Text of the legend."""
    color: str
    """Hexadecimal colour of the curve."""
    marked: bool = False
    """True draws the points, too: for metrics of few rows."""


@dataclass(frozen=True, slots=True)
class MetricChart:
    """One chart with its curves."""

    name: str
    """File name without ending."""
    title: str
    """Title above the chart."""
    unit: str
    """Title of the vertical axis, with the unit."""
    lines: tuple[Line, ...]
    """Curves, drawn one over the other."""
    is_share: bool = False
    """True: values are in [0, 1], shown as percentages."""
    is_log: bool = False
    """True: the vertical axis is logarithmic if all values are positive."""


CHARTS = (
    MetricChart(
        "reward", "Reward", "mean reward per response", (Line("rl", "reward/mean", "sampled responses", ROLLOUTS),)
    ),
    MetricChart(
        "accuracy",
        "Accuracy",
        "share of right answers",
        (
            Line("rl", "accuracy/mean", "sampled, training problems", ROLLOUTS),
            Line("evaluation", "accuracy/mean", "greedy, dev problems", EVALUATION, marked=True),
        ),
        is_share=True,
    ),
    MetricChart(
        "length", "Response length", "mean tokens", (Line("rl", "response/length_mean", "sampled responses", ROLLOUTS),)
    ),
    MetricChart(
        "mismatch",
        "Sampler against trainer",
        "mean |log-prob difference| in nats",
        (
            Line("rl", "mismatch/logprob_abs_mean", "as trained", TRAINED),
            Line("rl", "mismatch/neither/logprob_abs_mean", "nothing kept", NOTHING_KEPT, marked=True),
            Line("rl", "mismatch/both/logprob_abs_mean", "routing and sampling mask kept", REST, marked=True),
        ),
        is_log=True,
    ),
)


def draw_curves(metrics_path: Path, directory: Path, title: str = "") -> list[Path]:
    """Draws one PNG per chart that has data, and all of them together in `curves.png`.

    Args:
        metrics_path: a run's `metrics.jsonl`.
        directory: folder of the PNGs; made if needed.
        title: of the overview, for example the name of the run.

    Returns:
        The files written, the overview first; empty if there is nothing to draw.
    """
    rows = read_rows(metrics_path)
    charts = [chart for chart in CHARTS if any(_points(rows, line)[0] for line in chart.lines)]
    if not charts:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    overview = directory / OVERVIEW_FILE
    figure = new_figure(12.0, 7.6 if len(charts) > 2 else 4.2)
    axes = figure.subplots(-(-len(charts) // 2), min(2, len(charts)), squeeze=False).flatten()
    for axis, chart in zip(axes, charts, strict=False):
        _draw(axis, rows, chart)
    for axis in axes[len(charts) :]:
        axis.set_visible(False)
    if title:
        figure.suptitle(title, color=INK, fontsize=14, fontweight="bold", x=0.012, ha="left")
    figure.savefig(overview, dpi=130)
    for chart in charts:
        figure = new_figure(7.0, 4.2)
        _draw(figure.subplots(), rows, chart)
        figure.savefig(directory / f"{chart.name}.png", dpi=130)
    return [overview, *(directory / f"{chart.name}.png" for chart in charts)]


def _points(rows: Sequence[dict[str, Any]], line: Line) -> tuple[list[int], list[float]]:
    """Returns steps and values of a curve."""
    chosen = [row for row in rows if row["stage"] == line.stage and line.metric in row]
    return [row["step"] for row in chosen], [row[line.metric] for row in chosen]


def new_figure(width: float, height: float):
    """Returns a figure of its own canvas: no pyplot, so no state is shared with the caller."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)  # type: ignore[union-attr]
    FigureCanvasAgg(figure)
    return figure


def _draw(axis: Axes, rows: Sequence[dict[str, Any]], chart: MetricChart) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

    curves = [(line, *points) for line in chart.lines if (points := _points(rows, line))[0]]
    for line, steps, values in curves:
        style: dict[str, Any] = {"linewidth": 1.4 if line.marked else 1.8}
        if line.marked or len(steps) == 1:
            style |= {"marker": "o", "markersize": 5.0}
        axis.plot(steps, values, color=line.color, label=line.label, **style)
    axis.set_title(chart.title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=8)
    axis.set_xlabel("training step", color=QUIET)
    axis.set_ylabel(chart.unit, color=QUIET)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    if chart.is_share:
        axis.set_ylim(0.0, 1.0)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    heights = [value for _, _, values in curves for value in values]
    if chart.is_log and min(heights) > 0.0:
        # From a power of ten to a power of ten.
        axis.set_yscale("log")
        axis.set_ylim(10.0 ** math.floor(math.log10(min(heights))), 10.0 ** math.ceil(math.log10(max(heights)) + 1e-9))
        axis.yaxis.set_minor_formatter(NullFormatter())
    elif not chart.is_share:
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
    quiet_frame(axis)
    if len(curves) > 1:
        axis.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")


def quiet_frame(axis: Axes) -> None:
    axis.grid(True, color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", colors=QUIET, length=0)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
