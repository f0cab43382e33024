"""Samples trained per second with the engine in its own process, against turns; and the prediction of `moerl plan run`.

`python bench/overlap.py MODEL [--engine sglang] [--staleness N] [--every N] [--rounds N] [--steps N] [--json FILE]`,
with the directory of the model that every run begins with, for example the `cold_start` of a laptop run. On a machine
with two idle cores: runs of `recipe=laptop`, synchronous and with `rollout.placement=process buffer.max_staleness=1`,
in turns; or, with `--engine sglang`, of `rollout=sglang` without staleness and with `buffer.max_staleness=4
weights.every=3` and room for 384 responses at a time, with updates that interrupt responses. Evaluation and the
mismatch with nothing kept are left out. So are the steps in which slots are filled at the start of a run, and those at
its end, when there is no more to dispatch: engines that do nothing any more would not slow the trainer down.

CPU seconds are those of the run and all processes that it started, over the steps that are measured. The planner is
calibrated with each synchronous run; its prediction for the other is the optimum: a trainer and an engine that do not
slow each other down.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _report import Result, command_line, report

from moerl.buffer.simulated_turns import SimulatedTurn, drawn_from
from moerl.config.load import CONFIG_FILE, load_resolved
from moerl.contract.disk import read_parquet
from moerl.launch.calibration import calibrate
from moerl.launch.plan_run import predict
from moerl.telemetry.sinks import METRICS_FILE, read_rows

WARM_UP, SAMPLES = 8, 24 * 8
FASTER, OPTIMUM, WITHIN = 1.5, 0.9, 0.15
STALENESS, EVERY = {"embedded": 1, "sglang": 4}, {"embedded": 1, "sglang": 3}
ENGINES = {
    "embedded": {"in turns": [], "beside": ["rollout.placement=process"]},
    "sglang": {"in turns": ["rollout=sglang"], "beside": ["rollout=sglang", "rollout.max_running=384"]},
}
QUIET = [
    *("evaluation.every=0", "evaluation.heldout_problems=1", "evaluation.dev_problems=1"),
    *("checkpoint.every=0", "mismatch.every=0", "dump.rollouts_every=4"),
]


@dataclass(frozen=True, slots=True)
class Measured:
    """samples: a second. cpu_seconds: of a step. engine_waits, trainer_waits: shares of time."""

    samples: float
    cpu_seconds: float
    engine_waits: float
    trainer_waits: float


def run(model: Path, folder: Path, steps: int, staleness: int, extra: list[str]) -> Measured:
    """Measures `steps` steps; more come before and behind them, as many with and without staleness."""
    first, last = WARM_UP, WARM_UP + steps
    total = last + staleness + 1
    keys = [f"model.path={model}", "model.architecture=null", "sft.steps=0", f"rl.steps={total}", f"run_dir={folder}"]
    command = [sys.executable, "-m", "moerl", "train", "recipe=laptop", *keys, *QUIET, *extra]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        marks = [cpu_seconds_at(process, folder, count) for count in (first, last)]
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: status {process.returncode}")
    rows = rl_rows(folder)[first:last]
    return Measured(
        SAMPLES * len(rows) / sum(row["seconds/step"] for row in rows),
        (marks[1] - marks[0]) / steps,
        statistics.mean(row.get("waiting/engine_for_slots", 0.0) for row in rows),
        statistics.mean(row["waiting/trainer_for_rollouts"] for row in rows),
    )


def rl_rows(folder: Path) -> list[Mapping[str, Any]]:
    metrics = folder / METRICS_FILE
    return [row for row in read_rows(metrics) if row["stage"] == "rl"] if metrics.is_file() else []


def cpu_seconds_at(process: subprocess.Popen[bytes], folder: Path, num_steps: int) -> float:
    """CPU time that a run's processes have taken when it has done so many steps."""
    while len(rl_rows(folder)) < num_steps and process.poll() is None:
        time.sleep(0.1)
    parents, seconds = dict[int, int](), dict[int, float]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # ended meanwhile
            fields = stat.read_text().rpartition(") ")[2].split()
            pid = int(stat.parent.name)
            parents[pid] = int(fields[1])
            seconds[pid] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    own = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(seconds.get(pid, 0.0) for pid in own)


def predicted(calibrated: Path, folder: Path, steps: int) -> float:
    """Samples a second of the run in `folder` by the planner, calibrated with the synchronous run in `calibrated`.

    Responses grow longer while the model learns: lengths are those of the steps that are measured.
    """
    config, costs = load_resolved(folder / CONFIG_FILE), calibrate(calibrated).costs
    dumps = [calibrated / "rollouts" / f"step-{step:06}.parquet" for step in range(WARM_UP + 1, WARM_UP + steps + 1)]
    trajectories = [trajectory for dump in dumps if dump.is_file() for trajectory in read_parquet(dump)]
    draw = drawn_from([[SimulatedTurn(trajectory.num_sampled)] for trajectory in trajectories], config.seed)
    return SAMPLES / predict(config, config.queue_limits(), costs, draw).step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", choices=ENGINES, default="embedded")
    parser.add_argument("--staleness", type=int, metavar="N", help="beside the trainer (1; 4 with sglang)")
    parser.add_argument("--every", type=int, metavar="N", help="steps between two updates then (1; 3 with sglang)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="that are measured of a run (24)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    arguments = parser.parse_args()
    began, model = command_line(), arguments.model.resolve()
    ratios, own, optimum = list[float](), list[float](), list[float]()
    staleness = STALENESS[arguments.engine] if arguments.staleness is None else arguments.staleness
    variants = {name: [*extra] for name, extra in ENGINES[arguments.engine].items()}
    every = EVERY[arguments.engine] if arguments.every is None else arguments.every
    variants["beside"] += [f"buffer.max_staleness={staleness}", f"weights.every={every}"]
    taken: dict[str, list[Measured]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.rounds):
            folders = {name: Path(temporary) / f"{name.replace(' ', '-')}-{number}" for name in variants}
            for name, extra in variants.items():
                taken[name].append(run(model, folders[name], arguments.steps, staleness, extra))
                print(f"round {number + 1} of {arguments.rounds}: {name}: {taken[name][-1].samples:.1f} samples/s")
            turns, beside = taken["in turns"][-1].samples, taken["beside"][-1].samples
            ratios.append(beside / turns)
            own.append(predicted(folders["in turns"], folders["in turns"], arguments.steps) / turns)
            optimum.append(beside / predicted(folders["in turns"], folders["beside"], arguments.steps))
    results = [began]
    for name, values in taken.items():
        for what, unit in (
            ("samples", "/s"),
            ("cpu_seconds", "s"),
            ("engine_waits", "share"),
            ("trainer_waits", "share"),
        ):
            each = [getattr(value, what) for value in values]
            label = what.replace("_", " ")
            results.append(Result(f"{name}: {label}", statistics.median(each), unit=unit, spread=max(each) - min(each)))
    for label, values, goal, holds in (
        ("samples a second, beside / in turns", ratios, f">= {FASTER:g}", lambda v: v >= FASTER),
        ("in turns: predicted / measured", own, f"within {WITHIN:.0%}", lambda v: abs(v - 1) <= WITHIN),
        ("beside: measured / simulator's optimum", optimum, f">= {OPTIMUM:g}", lambda v: v >= OPTIMUM),
    ):
        value = statistics.median(values)
        results.append(Result(label, value, goal, bool(holds(value)), spread=max(values) - min(values)))
    report(results, arguments.json)


if __name__ == "__main__":
    main()
