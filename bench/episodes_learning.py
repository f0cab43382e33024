"""Learning of recipes whose prompts are played: accuracy on dev problems by step, several seeds of each recipe.

`python bench/episodes_learning.py RECIPE... [--seeds N] [--runs DIR] [--set KEY=VALUE...] [--json FILE] [--image FILE]`
on a machine with two idle cores: minutes for each seed of a recipe. Responses are greedy; the baseline is the cold
start of the same run. The image has a thin line for each seed and a thick one for their mean; calls of tools by sampled
episodes have a line of their own. Runs that `--runs` holds already are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from _report import Result, command_line, report

from moerl.diagnostics.colors import EVALUATION, ROLLOUTS
from moerl.diagnostics.plots import INK, QUIET, new_figure, quiet_frame
from moerl.telemetry.sinks import METRICS_FILE, read_rows

CALLS = "reward/tool_calls/mean"
"""Metric of the calls of tools of a sampled episode."""
MINUTES = 10.0
"""Goal: the longest that a run may take, cold start and evaluations included."""
Curve = Mapping[int, float]
"""Accuracy by step; 0 is the cold start."""


def train(recipe: str, seed: int, folder: Path, keys: Sequence[str]) -> None:
    """Runs a recipe in `folder`, unless a run there has reached its end."""
    if (folder / "summary.json").exists():
        return
    command = [sys.executable, "-m", "moerl", "train", f"recipe={recipe}", f"seed={seed}", f"run_dir='{folder}'", *keys]
    finished = subprocess.run(command, stdout=subprocess.DEVNULL)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}: status {finished.returncode}")


def dev_curve(folder: Path) -> Curve:
    """Reads the accuracy on dev problems from a run."""
    rows = read_rows(folder / METRICS_FILE)
    return {row["step"]: row["accuracy/mean"] for row in rows if row["stage"] == "evaluation"}


def calls_curve(folders: Sequence[Path]) -> Curve:
    """Reads the calls of tools by sampled episodes, means over runs; empty if their task counts none."""
    of_runs = [[row for row in read_rows(folder / METRICS_FILE) if row["stage"] == "rl"] for folder in folders]
    return mean_curve([{row["step"]: row[CALLS] for row in rows if CALLS in row} for rows in of_runs])


def heldout(folder: Path) -> tuple[float, float]:
    """Reads the accuracy on held-out problems, before and after RL."""
    rows = read_rows(folder / METRICS_FILE)
    found = [row["heldout/accuracy"] for row in rows if "heldout/accuracy" in row]
    return found[0], found[-1]


def minutes(folder: Path) -> float:
    """Reads the minutes that a run took."""
    return json.loads((folder / "summary.json").read_text())["wall_seconds"] / 60


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Returns the mean over curves, at the steps that all of them have."""
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return {step: statistics.mean(curve[step] for curve in curves) for step in shared}


def results(recipe: str, folders: Sequence[Path]) -> list[Result]:
    """Returns the accuracies of a recipe; the spread is over seeds."""

    def result(name: str, values: Sequence[float], goal: str = "", holds: bool = True) -> Result:
        spread = max(values) - min(values)
        return Result(f"{recipe}: {name}", statistics.mean(values), goal, holds, "accuracy", spread)

    pairs = [heldout(folder) for folder in folders]
    calls = calls_curve(folders)
    ends = {"first": min(calls), "last": max(calls)} if calls else {}
    before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    curves = [dev_curve(folder) for folder in folders]
    slowest = max(minutes(folder) for folder in folders)
    return [
        Result(f"{recipe}: slowest seed", slowest, f"<= {MINUTES:g}", slowest <= MINUTES, "minutes"),
        result("held-out problems, cold start", before),
        result("held-out problems, after RL", after, "above the cold start with every seed", min(after) > max(before)),
        *(Result(f"{recipe}: tool calls of a sampled episode, {when} step", calls[at]) for when, at in ends.items()),
        *(result(f"dev problems, step {step}", [c[step] for c in curves]) for step in mean_curve(curves)),
    ]


def draw(found: Mapping[str, Sequence[Path]], path: Path) -> None:
    """Draws one chart for each recipe. found: folders of its runs, by recipe."""
    from matplotlib.ticker import PercentFormatter

    figure = new_figure(4.6 * len(found), 3.6)
    for axis, (recipe, folders) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
        curves = [dev_curve(folder) for folder in folders]
        for curve in curves:
            axis.plot(list(curve), list(curve.values()), color=EVALUATION, linewidth=0.9, alpha=0.5)
        mean = mean_curve(curves)
        axis.plot(list(mean), list(mean.values()), color=EVALUATION, linewidth=2.6)
        if calls := calls_curve(folders):
            axis.plot(list(calls), list(calls.values()), color=ROLLOUTS, linewidth=1.8, label="tool calls, sampled")
            axis.legend(frameon=False, loc="lower right", labelcolor=INK)
        axis.set_title(recipe, loc="left", color=INK, fontsize=12, fontweight="bold", pad=8)
        axis.set_xlabel("training step", color=QUIET)
        axis.set_ylabel("accuracy, greedy, dev problems", color=QUIET)
        axis.set_ylim(0.0, 1.0)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        quiet_frame(axis)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each recipe")
    parser.add_argument("--runs", type=Path, default=None, metavar="DIR", help="keep the runs here")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="keys of all runs")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results here")
    parser.add_argument("--image", type=Path, default=None, metavar="FILE", help="draw the curves here")
    given = parser.parse_args()
    measured = [command_line()]
    with tempfile.TemporaryDirectory() as kept:
        runs: Path = given.runs or Path(kept)
        found = {each: [runs / f"{each}-{seed}" for seed in range(1, given.seeds + 1)] for each in given.recipes}
        for recipe, folders in found.items():
            for seed, folder in enumerate(folders, 1):
                train(recipe, seed, folder, given.set)
            measured += results(recipe, folders)
        if given.image is not None:
            draw(found, given.image)
    report(measured, given.json)


if __name__ == "__main__":
    main()
