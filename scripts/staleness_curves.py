"""Accuracy and mismatch of runs with and without staleness, seeds as thin lines, their mean as a thick one.

    python scripts/staleness_curves.py runs/sync-1 runs/sync-2 runs/beside-1 runs/beside-2 --plot staleness.png

`buffer.max_staleness` distinguishes the runs; all have equally many steps.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import OmegaConf

from moerl.diagnostics.colors import BLUE, GREEN, ORANGE
from moerl.diagnostics.plots import INK, QUIET, new_figure, quiet_frame
from moerl.telemetry.sinks import read_rows

CHARTS = (
    ("accuracy/mean", "Accuracy of sampled responses", "share of right answers, mean of 5 steps", 5),
    ("mismatch/logprob_abs_mean", "Sampler against trainer, as trained", "mean |log-prob difference| in nats", 5),
)


def main() -> int:
    """Draws the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--plot", type=Path, required=True, help="write a PNG")
    arguments = parser.parse_args()
    by_staleness: dict[int, list[list[dict[str, Any]]]] = {}
    for run in arguments.runs:
        steps = [row for row in read_rows(run / "metrics.jsonl") if row["stage"] == "rl"]
        staleness = int(OmegaConf.select(OmegaConf.load(run / "config.yaml"), "buffer.max_staleness"))
        by_staleness.setdefault(staleness, []).append(steps)
    draw(by_staleness, arguments.plot)
    return 0


def draw(by_staleness: dict[int, list[list[dict[str, Any]]]], path: Path) -> None:
    """One chart per metric, one colour per staleness."""
    figure = new_figure(11.0, 4.2)
    for axis, (metric, title, unit, width) in zip(figure.subplots(1, len(CHARTS)), CHARTS, strict=True):
        for color, (staleness, runs) in zip((BLUE, ORANGE, GREEN), sorted(by_staleness.items()), strict=False):
            values = np.array([[float(step[metric]) for step in run] for run in runs])
            smooth = np.array([_running_mean(each, width) for each in values])
            places = np.arange(width, width + smooth.shape[1])
            for each in smooth:
                axis.plot(places, each, color=color, linewidth=0.8, alpha=0.45)
            label = f"max_staleness {staleness}, {len(runs)} seeds"
            axis.plot(places, smooth.mean(0), color=color, linewidth=2.0, label=label)
        axis.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=8)
        axis.set_xlabel("step", color=QUIET)
        axis.set_ylabel(unit, color=QUIET)
        axis.set_ylim(bottom=0)
        quiet_frame(axis)
        axis.legend(frameon=False, fontsize=9, labelcolor=INK, loc="best")
    figure.savefig(path, dpi=130)


def _running_mean(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    return np.convolve(values, np.ones(width) / width, mode="valid")


if __name__ == "__main__":
    sys.exit(main())
