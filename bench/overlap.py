"""Samples trained per second with the engine beside the trainer, against taking turns; and what `moerl plan run` says.

`python bench/overlap.py MODEL [--engine sglang] [--staleness N] [--rounds N] [--steps N] [--json FILE]`, with the
directory of the model that every run begins with, for example the `cold_start` of a laptop run. On a machine with two
idle cores: runs of `recipe=laptop`, synchronous and with `rollout.placement=beside buffer.max_staleness=1`, in turns;
or, with `--engine sglang`, of `rollout=sglang` without staleness and with `buffer.max_staleness=2`, where updates
interrupt what is being sampled. Evaluation and the mismatch with nothing kept, which the last step has, are left out.
The planner is calibrated with each synchronous run; its prediction for the other is the optimum: a trainer and an
engine that do not slow each other down.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from _report import Result, command_line, report

from moerl.buffer.queue import QueueLimits
from moerl.buffer.simulation import drawn_from
from moerl.config.load import CONFIG_FILE, load_resolved
from moerl.launch.calibration import calibrate
from moerl.launch.plan_run import predict
from moerl.telemetry.sinks import METRICS_FILE, read_rows

WARM_UP, SAMPLES = 3, 24 * 8
FASTER, OPTIMUM, WITHIN = 1.5, 0.9, 0.15
STALENESS = {"embedded": 1, "sglang": 2}
ENGINES = {
    "embedded": {"in turns": [], "beside": ["rollout.placement=beside"]},
    "sglang": {"in turns": ["rollout=sglang"], "beside": ["rollout=sglang"]},
}
QUIET = [
    *("evaluation.every=0", "evaluation.heldout_problems=1", "evaluation.dev_problems=1"),
    *("checkpoint.every=0", "mismatch.every=0"),
]


@dataclass(frozen=True, slots=True)
class Measured:
    """samples: a second. engine_waits, trainer_waits: shares of time."""

    samples: float
    engine_waits: float
    trainer_waits: float


def run(model: Path, folder: Path, steps: int, extra: list[str]) -> Measured:
    keys = [f"model.path={model}", "model.architecture=null", "sft.steps=0", f"rl.steps={steps}", f"run_dir={folder}"]
    command = [sys.executable, "-m", "moerl", "train", "recipe=laptop", *keys, *QUIET, *extra]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [row for row in read_rows(folder / METRICS_FILE) if row["stage"] == "rl"][WARM_UP:-1]
    seconds = sum(row["seconds/step"] for row in rows)
    return Measured(
        SAMPLES * len(rows) / seconds,
        statistics.mean(row.get("waiting/engine_for_slots", 0.0) for row in rows),
        statistics.mean(row["waiting/trainer_for_rollouts"] for row in rows),
    )


def predicted(folder: Path, staleness: int) -> float:
    """Samples a second by the planner, calibrated with the synchronous run in `folder`."""
    config, calibration = load_resolved(folder / CONFIG_FILE), calibrate(folder)
    limits = QueueLimits(config.rl.prompts_per_step, staleness)
    found = predict(config, limits, calibration.costs, drawn_from(calibration.lengths, config.seed))
    return SAMPLES / found.step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--engine", choices=ENGINES, default="embedded")
    parser.add_argument("--staleness", type=int, metavar="N", help="beside the trainer (1; 2 with sglang)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--steps", type=int, default=24, metavar="N", help="of a run; the planner needs 13 (24)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    arguments = parser.parse_args()
    began, model = command_line(), arguments.model.resolve()
    ratios, own, optimum = list[float](), list[float](), list[float]()
    staleness = STALENESS[arguments.engine] if arguments.staleness is None else arguments.staleness
    variants = {name: [*extra] for name, extra in ENGINES[arguments.engine].items()}
    variants["beside"].append(f"buffer.max_staleness={staleness}")
    taken: dict[str, list[Measured]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(arguments.rounds):
            for name, extra in variants.items():
                folder = Path(temporary) / f"{name.replace(' ', '-')}-{number}"
                taken[name].append(run(model, folder, arguments.steps, extra))
                print(f"round {number + 1} of {arguments.rounds}: {name}: {taken[name][-1].samples:.1f} samples/s")
            turns, beside = taken["in turns"][-1].samples, taken["beside"][-1].samples
            folder = Path(temporary) / f"in-turns-{number}"
            ratios.append(beside / turns)
            own.append(predicted(folder, 0) / turns)
            optimum.append(beside / predicted(folder, staleness))
    results = [began]
    for name, values in taken.items():
        for what in ("samples", "engine_waits", "trainer_waits"):
            each = [getattr(value, what) for value in values]
            unit = "/s" if what == "samples" else "share"
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
