"""When Keep Routing helps: learning curves by routing mode, staleness, correction and the sampler's noise.

    python scripts/keep_routing_study.py --runs runs/keep_routing --json study.json --plots docs/images

Per seed: a cold start, then `moerl train recipe=keep_routing_study` for each arm, all from it. Finished
runs in `--runs` are used again, and numbers and figures are of finished runs, so a study that was cut off goes on or is
shown as it is (`--show`). Each part of the arms is done for every seed before the next. Keys of `moerl train` given
first hold for all runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from moerl.diagnostics.colors import BLUE, GREEN, ORANGE
from moerl.diagnostics.plots import INK, QUIET, new_figure, quiet_frame
from moerl.telemetry.sinks import read_rows

MODES = {"off": ORANGE, "trainer": BLUE, "rollout": GREEN}
CORRECTIONS = {
    "none": ("algorithm.importance=off",),
    "TIS": ("algorithm.importance=token", "algorithm.importance_cap=2.0"),
    "IcePop": (
        "algorithm.importance=token",
        "algorithm.importance_cap=5.0",
        "algorithm.importance_floor=0.5",
        "algorithm.importance_outside=drop",
    ),
}
SERIES = {
    "accuracy": "accuracy/mean",
    "k3": "mismatch/k3",
    "abs": "mismatch/logprob_abs_mean",
    "far": "mismatch/share_above_ln2",
    "grad_norm": "optimizer/grad_norm",
    "age": "staleness/age_mean",
}
"""Per step, by the names that the JSON has for them."""
WINDOW = 5
"""Steps that a point of a curve of sampled accuracy is the mean of."""
COLLAPSED = 0.75
"""A run collapsed if its sampled accuracy ends below this share of its best value, both over `WINDOW`."""


@dataclass(frozen=True, slots=True)
class Arm:
    """Settings in which runs differ: rollout.dtype (noise), buffer.max_staleness, keep_routing.mode and correction."""

    noise: str
    staleness: int
    mode: str
    correction: str = "TIS"

    @property
    def name(self) -> str:
        return f"{self.noise}-{self.staleness}-{self.mode}-{self.correction}".lower()

    @property
    def keys(self) -> list[str]:
        placement = "process" if self.staleness else "controller"
        return [
            f"rollout.dtype={self.noise}",
            f"rollout.placement={placement}",
            f"buffer.max_staleness={self.staleness}",
            f"keep_routing.mode={self.mode}",
            *CORRECTIONS[self.correction],
        ]


PARTS = (
    [Arm("float8", age, mode) for age in (8, 0) for mode in MODES]
    + [Arm("bfloat16", 0, mode) for mode in ("off", "rollout")],
    [Arm("float8", 8, mode, correction) for correction in ("none", "IcePop") for mode in ("off", "rollout")],
    [Arm("bfloat16", 8, mode) for mode in ("off", "rollout")],
    [Arm("float8", 2, mode) for mode in ("off", "rollout")],
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/keep_routing_study"))
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--json", type=Path, help="write every number")
    parser.add_argument("--plots", type=Path, help="write PNGs into this directory")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further keys of `moerl train`")
    arguments = parser.parse_args()
    if not arguments.show:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(lambda seed: cold_start(arguments.runs, seed, arguments.overrides), arguments.seeds))
            todo = [(seed, arm) for part in PARTS for seed in arguments.seeds for arm in part]
            list(pool.map(lambda each: train(arguments.runs, *each, arguments.overrides), todo))
    found = list(results(arguments.runs, arguments.seeds))
    show(found)
    if arguments.json:
        rows = ",\n".join(json.dumps(each, separators=(",", ":")) for each in found)
        arguments.json.write_text(f"[\n{rows}\n]\n")
    if arguments.plots:
        draw_noise_and_age(found, arguments.plots / "keep_routing_study.png")
        draw_corrections(found, arguments.plots / "keep_routing_corrections.png")
    return 0


def _cold(runs: Path, seed: int) -> Path:
    return runs / f"seed-{seed}" / "cold"


def cold_start(runs: Path, seed: int, overrides: Sequence[str]) -> None:
    """The model that all arms of a seed start from."""
    cold = _cold(runs, seed)
    if not (cold / "cold_start").exists():
        _moerl(["sft", "recipe=keep_routing_study", f"seed={seed}", *overrides, f"run_dir={cold}"], cold)


def train(runs: Path, seed: int, arm: Arm, overrides: Sequence[str]) -> None:
    """One arm of one seed. One that fails is left out of the study, with its log."""
    run = runs / f"seed-{seed}" / arm.name
    if (run / "summary.json").exists():
        return
    model = ["model.architecture=null", f"model.path={_cold(runs, seed) / 'cold_start'}", "sft.steps=0"]
    recipe = ["train", "recipe=keep_routing_study", f"seed={seed}", *model]
    _moerl([*recipe, *arm.keys, *overrides, f"run_dir={run}"], run)


def _moerl(arguments: Sequence[str], run: Path) -> None:
    run.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with run.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-P", "-m", "moerl", *arguments]
        status = subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode
    print(f"{run}: {'done' if status == 0 else f'status {status}'}", flush=True)


def results(runs: Path, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields the measurements of each finished run, with its arm and seed."""
    for arm in (arm for part in PARTS for arm in part):
        for seed in seeds:
            run = runs / f"seed-{seed}" / arm.name
            if (run / "summary.json").exists():
                yield {**asdict(arm), "seed": seed, **measured(read_rows(run / "metrics.jsonl"))}


def measured(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracies, the distance between engine and trainer before the first update, and curves."""
    steps = [row for row in rows if row["stage"] == "rl"]
    dev = [(row["step"], row["accuracy/mean"]) for row in rows if row["stage"] == "evaluation"]
    first, last = (next(row for row in each if row["stage"] == "evaluation") for each in (rows, rows[::-1]))
    return {
        "cold_start": first["heldout/accuracy"],
        "heldout": last["heldout/accuracy"],
        "dev": [[step, _short(value)] for step, value in dev],
        "first": scored(steps[0]),
        "last": scored(steps[-1]),
        "collapsed": collapsed([row["accuracy/mean"] for row in steps]),
        "series": {name: [_short(row[metric]) for row in steps] for name, metric in SERIES.items()},
    }


def scored(step: dict[str, Any]) -> dict[str, float]:
    """The batch of a step under the weights before its first update, by own routing (off) and recorded (rollout)."""
    return {
        "other_experts": _short(step["mismatch/kept_sets/tokens_with_different_experts"]),
        "k3_off": _short(step["mismatch/kept_sets/k3"]),
        "k3_rollout": _short(step["mismatch/both/k3"]),
        "abs_off": _short(step["mismatch/kept_sets/logprob_abs_mean"]),
        "abs_rollout": _short(step["mismatch/both/logprob_abs_mean"]),
    }


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def collapsed(accuracy: Sequence[float]) -> bool:
    """Tells whether a curve of sampled accuracy ended far below its best."""
    smooth = _running_mean(accuracy)
    return bool(smooth[-1] < COLLAPSED * smooth.max())


def _running_mean(values: Sequence[float]) -> np.ndarray:
    return np.convolve(values, np.ones(WINDOW) / WINDOW, mode="valid")


def final_accuracy(run: dict[str, Any]) -> float:
    """Mean of the last two evaluations on dev problems, greedy."""
    return statistics.mean(value for _, value in run["dev"][-2:])


def show(found: Sequence[dict[str, Any]]) -> None:
    """One line per arm: means over seeds, and the range of the accuracy."""
    columns = "sampler,staleness,correction,mode,seeds,accuracy,range,best dev,age,k3,far,grad norm,largest,collapsed"
    table = Table(*columns.split(","))
    for arm in (arm for part in PARTS for arm in part):
        runs = of(found, **asdict(arm))
        if not runs:
            continue
        final = [final_accuracy(run) for run in runs]
        mean = {name: statistics.mean(statistics.mean(run["series"][name]) for run in runs) for name in SERIES}
        best = statistics.mean(max(value for _, value in run["dev"]) for run in runs)
        largest = max(max(run["series"]["grad_norm"]) for run in runs)
        table.add_row(
            arm.noise,
            str(arm.staleness),
            arm.correction,
            arm.mode,
            str(len(runs)),
            f"{statistics.mean(final):.3f}",
            f"{min(final):.3f}..{max(final):.3f}",
            f"{best:.3f}",
            f"{mean['age']:.2f}",
            f"{mean['k3']:.1e}",
            f"{mean['far']:.2%}",
            f"{mean['grad_norm']:.2f}",
            f"{largest:.2f}",
            f"{sum(run['collapsed'] for run in runs)}",
        )
    Console(width=160).print(table)


def of(found: Sequence[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    """Runs with these values."""
    return [run for run in found if all(run[key] == value for key, value in values.items())]


def _curve(axis: Any, runs: Sequence[dict[str, Any]], series: str, mode: str) -> None:
    """Mean over seeds as a line, their range as a band."""
    curves = np.array([_running_mean(run["series"][series]) for run in runs])
    steps = np.arange(WINDOW, WINDOW + curves.shape[1])
    axis.fill_between(steps, curves.min(0), curves.max(0), color=MODES[mode], alpha=0.15, linewidth=0)
    style = {"off": "-", "trainer": "--", "rollout": "-."}[mode]
    axis.plot(steps, curves.mean(0), style, color=MODES[mode], linewidth=2.0, label=f"mode={mode}")


ROWS = (("accuracy", "sampled accuracy"), ("k3", "mismatch k3, nats"), ("grad_norm", "gradient norm"))


def _draw(found: Sequence[dict[str, Any]], columns: dict[str, dict[str, Any]], path: Path) -> None:
    """One column per case, one row per measurement, one line per mode."""
    from matplotlib.ticker import NullFormatter

    figure = new_figure(3.6 * len(columns), 8.4)
    grid = figure.subplots(len(ROWS), len(columns), squeeze=False, sharey="row", sharex=True)
    for row, (series, label) in enumerate(ROWS):
        for axis, (title, case) in zip(grid[row], columns.items(), strict=True):
            for mode in MODES:
                if runs := of(found, mode=mode, **case):
                    _curve(axis, runs, series, mode)
            if row == 0:
                axis.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold", pad=8)
            if row == len(ROWS) - 1:
                axis.set_xlabel("step", color=QUIET)
            quiet_frame(axis)
        grid[row][0].set_ylabel(label, color=QUIET)
        if series == "k3":
            grid[row][0].set_yscale("log")
            low, high = np.log10(grid[row][0].get_ylim())
            grid[row][0].set_ylim(10.0 ** np.floor(low), 10.0 ** np.ceil(high))
            grid[row][0].yaxis.set_minor_formatter(NullFormatter())
        else:
            grid[row][0].set_ylim(0.0, 1.0 if series == "accuracy" else None)
    widest = max(grid[0], key=lambda axis: len(axis.get_legend_handles_labels()[1]))
    widest.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower left")
    figure.savefig(path, dpi=110)


def draw_noise_and_age(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Noise and staleness, with TIS; what has no run is left out."""
    columns = {
        f"{noise}, max_staleness {age}": {"noise": noise, "staleness": age, "correction": "TIS"}
        for noise, age in (("bfloat16", 0), ("float8", 0), ("bfloat16", 8), ("float8", 2), ("float8", 8))
    }
    _draw(found, {title: case for title, case in columns.items() if of(found, **case)}, path)


def draw_corrections(found: Sequence[dict[str, Any]], path: Path) -> None:
    """The corrections at the largest noise and staleness."""
    titles = {"none": "no correction", "TIS": "TIS", "IcePop": "IcePop"}
    _draw(
        found, {title: {"noise": "float8", "staleness": 8, "correction": name} for name, title in titles.items()}, path
    )


if __name__ == "__main__":
    sys.exit(main())
