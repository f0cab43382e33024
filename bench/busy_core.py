"""The demo with a program that keeps one of two cores busy, against the demo alone; and by how threads wait.

`python bench/busy_core.py [--quick] [--spins N ...] [--json FILE]`. Runs of `recipe=demo` with fewer steps and without
evaluations, on two cores of the machine. In each run a loop on one of the cores comes and goes, so that steps with and
without it alternate. The loop has a session of its own, as a program of another terminal has: Linux
shares cores among sessions first.

Runs differ in how long threads that wait spin (GOMP_SPINCOUNT): as moerl has it (`moerl/machine/torch_start.py`); the
baseline, 300,000 times as libgomp has it by itself; and the numbers of `--spins`. The baseline comes first and last;
each other run is compared with the nearest one. Seconds of the demo are those of its 320 steps of the cold start and 40
of reinforcement learning, by the means measured here; start and evaluations are left out. A step of the baseline with
the loop may take so long that a window ends before it does: it then counts as that long.

About seven minutes on an idle machine, three with `--quick`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from _report import Result, command_line, report

from moerl.machine.torch_start import NUM_SPINS, SPINS
from moerl.telemetry.sinks import METRICS_FILE, read_rows

BASELINE_SPINS = 300_000
BUSY, IDLE = 0.45, 0.97
STAGES = {"sft": 320, "rl": 40}
"""Steps of the demo."""
WINDOW_SECONDS = 15.0
"""Longest time for the steps of a window."""
QUIET = [
    *("evaluation.every=0", "evaluation.heldout_problems=1", "evaluation.dev_problems=1"),
    *("checkpoint.every=0", "mismatch.every=0", "dump.rollouts_every=0"),
]
LOOP = "while True: pass"


@dataclass(frozen=True, slots=True)
class Plan:
    """windows: with and without the loop, by turns, in each stage. steps: of a window, by stage."""

    windows: int
    steps: dict[str, int]

    def total(self, stage: str) -> int:
        """Steps of a stage: those of its windows, one before each, and three to begin with."""
        return self.windows * (self.steps[stage] + 1) + 3


FULL, QUICK = Plan(4, {"sft": 10, "rl": 4}), Plan(2, {"sft": 8, "rl": 3})


@dataclass(slots=True)
class Measured:
    """Seconds of steps by stage, alone (False) and with the loop (True)."""

    seconds: dict[tuple[str, bool], list[float]] = field(default_factory=dict)

    def step(self, stage: str, beside: bool) -> float:
        """The mean step of a stage."""
        return statistics.fmean(self.seconds[stage, beside])

    def demo(self, beside: bool) -> float:
        """Seconds that all steps of the demo would take."""
        return sum(count * self.step(stage, beside) for stage, count in STAGES.items())


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Keeps a core busy."""
    with subprocess.Popen([sys.executable, "-c", LOOP], start_new_session=True) as loop:
        try:
            os.sched_setaffinity(loop.pid, {core})
            yield
        finally:
            loop.kill()


class Run:
    """A run that is watched while it goes on."""

    def __init__(self, folder: Path, spins: int | None, plan: Plan) -> None:
        steps = [f"{stage}.steps={plan.total(stage)}" for stage in STAGES]
        keys = [*steps, f"sft.num_examples={64 * plan.total('sft')}", f"run_dir={folder}"]
        environment = {name: value for name, value in os.environ.items() if name not in (SPINS, "OMP_WAIT_POLICY")}
        environment |= {} if spins is None else {SPINS: str(spins)}
        self._folder, self._plan = folder, plan
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moerl", "train", "recipe=demo", *keys, *QUIET],
            env=environment,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def measure(self, core: int) -> Measured:
        """Measures all windows, and waits for the end of the run."""
        found = Measured()
        with self._process:
            try:
                for stage in STAGES:
                    self._rows_after(stage, 2, None)
                    for window in range(self._plan.windows):
                        beside = window % 2 == 1
                        if beside:
                            with busy_core(core):
                                seconds = self._window(stage)
                        else:
                            seconds = self._window(stage)
                        found.seconds.setdefault((stage, beside), []).extend(seconds)
                self._process.wait()
            finally:
                self._process.terminate()
        if self._process.returncode:
            raise SystemExit(f"the run in {self._folder} ended with status {self._process.returncode}")
        return found

    def _window(self, stage: str) -> list[float]:
        """Seconds of the next steps that begin after now; of the one that does not end in time, how long it went on."""
        began, count = time.monotonic(), self._plan.steps[stage]
        done = len(self._rows(stage))
        rows = self._rows_after(stage, done + 1 + count, began + WINDOW_SECONDS)
        # The first one began before the window.
        return rows[done + 1 :] or [time.monotonic() - began]

    def _rows_after(self, stage: str, count: int, until: float | None) -> list[float]:
        """Seconds of the steps of a stage, once there are so many, or it is so late, or the run has ended."""
        while len(rows := self._rows(stage)) < count and self._process.poll() is None:
            if until is not None and time.monotonic() > until:
                break
            time.sleep(0.05)
        return rows[:count]

    def _rows(self, stage: str) -> list[float]:
        metrics = self._folder / METRICS_FILE
        rows = read_rows(metrics) if metrics.is_file() else []
        return [row["seconds/step"] for row in rows if row["stage"] == stage]


def results(measured: Sequence[tuple[str, Measured]]) -> list[Result]:
    """Ratios of speeds.

    Args:
        measured: runs in their order; those of the baseline are named "baseline".
    """
    found: list[Result] = []
    for name in dict.fromkeys(name for name, _ in measured):
        runs = [each for other, each in measured if other == name]
        for stage, title in (("sft", "cold start"), ("rl", "reinforcement learning")):
            for beside in (False, True):
                each = [run.step(stage, beside) for run in runs]
                label = f"{name}: a step of {title}, {'beside the loop' if beside else 'alone'}"
                found.append(Result(label, statistics.median(each), unit="s", spread=max(each) - min(each)))
        goal = "" if name == "baseline" else f">= {BUSY}"
        found.append(
            _ratio(f"{name}: speed beside the loop / alone", [r.demo(False) / r.demo(True) for r in runs], goal)
        )
    for name in dict.fromkeys(name for name, _ in measured if name != "baseline"):
        pairs = list(_pairs(measured, name))
        cold = [base.step("sft", False) / run.step("sft", False) for run, base in pairs]
        found.append(_ratio(f"{name}: cold start alone, speed / baseline's", cold))
        demo = [base.demo(False) / run.demo(False) for run, base in pairs]
        found.append(_ratio(f"{name}: demo alone, speed / baseline's", demo, f">= {IDLE}"))
        beside = [base.demo(True) / run.demo(True) for run, base in pairs]
        found.append(_ratio(f"{name}: demo beside the loop, speed / baseline's", beside))
    return found


def _pairs(measured: Sequence[tuple[str, Measured]], name: str) -> Iterator[tuple[Measured, Measured]]:
    """Each run of a name with the nearest baseline."""
    baselines = [number for number, (other, _) in enumerate(measured) if other == "baseline"]
    for number, (other, run) in enumerate(measured):
        if other == name:
            yield run, measured[min(baselines, key=lambda at: abs(at - number))][1]


def _ratio(label: str, values: Sequence[float], goal: str = "") -> Result:
    value = statistics.median(values)
    holds = not goal or value >= float(goal.removeprefix(">= "))
    return Result(label, value, goal, holds, "ratio", max(values) - min(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run of each, with fewer steps")
    parser.add_argument("--spins", type=int, nargs="*", default=[], metavar="N", help="other numbers to try")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    arguments = parser.parse_args()
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit(f"two cores are needed; usable: {usable}")
    os.sched_setaffinity(0, usable[:2])
    began, plan = command_line(), QUICK if arguments.quick else FULL
    ours: dict[str, int | None] = {f"moerl, {NUM_SPINS} spins": None} | {f"{n} spins": n for n in arguments.spins}
    first = ["baseline", *ours]
    order = first if arguments.quick else [*first, *reversed(first)]
    measured: list[tuple[str, Measured]] = []
    with tempfile.TemporaryDirectory() as temporary:
        for number, name in enumerate(order):
            spins = BASELINE_SPINS if name == "baseline" else ours[name]
            measured.append((name, Run(Path(temporary) / f"run-{number}", spins, plan).measure(usable[1])))
            alone, beside = (measured[-1][1].demo(each) for each in (False, True))
            print(f"run {number + 1} of {len(order)}: {name}: demo {alone:.0f} s alone, {beside:.0f} s beside the loop")
    report([began, *results(measured)], arguments.json)


if __name__ == "__main__":
    main()
