"""Recipes as shipped on the device: cold start, GRPO, proved replay, checkpoints, report. A check of `gpu_check.py`.

`python -m moerl train recipe=NAME`, side by side, with as few steps as show it; on a CPU with small batches, too. A run
has to end well, with every metric finite, and every update has to be proved. Seconds per step are context: the runs
share the device with one another and with other checks.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from _gpu_checks import ROOT, Findings, keep
from _report import Result

STEPS = 2
"""Steps of GRPO."""
_FEW = ("sft.steps=3", f"rl.steps={STEPS}", "evaluation.dev_problems=16", "evaluation.heldout_problems=16")
_SMALL = ("sft.batch_size=8", "sft.num_examples=64", "rl.prompts_per_step=2", "rl.group_size=2")
RECIPES = {"tiny": (), "laptop": _FEW, "demo": _FEW}
"""By name: settings in addition to those that are shipped. The steps of recipe=tiny are few already."""
_SHOWN_LINES = 40
_POLL_SECONDS = 0.1


@dataclass(slots=True)
class Run:
    """A run of one recipe."""

    recipe: str
    folder: Path
    process: subprocess.Popen[bytes]
    log: BinaryIO
    started: float
    seconds: float = 0.0
    """How long it took; 0 until it has ended."""


def check(device: str) -> Findings:
    with tempfile.TemporaryDirectory() as folder:
        runs = [start(recipe, Path(folder), device) for recipe in RECIPES]
        while any(not run.seconds for run in runs):
            for run in runs:
                if not run.seconds and run.process.poll() is not None:
                    run.seconds = time.monotonic() - run.started
                    run.log.close()
                    keep(findings(runs))
            time.sleep(_POLL_SECONDS)
        return findings(runs)


def findings(runs: Sequence[Run]) -> Findings:
    """Results of the runs that have ended; texts: the end of the output of those that did not end well."""
    results: list[Result] = []
    texts: dict[str, str] = {}
    for run in runs:
        if not run.seconds:
            continue
        found = results_of(run)
        results += found
        if not all(result.holds for result in found):
            texts[run.recipe] = "\n".join(output(run).splitlines()[-_SHOWN_LINES:])
    return Findings(results, texts=texts)


def start(recipe: str, folder: Path, device: str) -> Run:
    # The kernels of a run are not interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings = [
        f"recipe={recipe}",
        *RECIPES[recipe],
        *(_SMALL if device == "cpu" else ()),
        f"run_dir={folder / recipe}",
    ]
    log = (folder / f"{recipe}.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "moerl", "train", *settings],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    return Run(recipe, folder / recipe, process, log, time.monotonic())


def output(run: Run) -> str:
    return Path(run.log.name).read_text(errors="replace")


def results_of(run: Run) -> list[Result]:
    """Returns the results of a run: whether it ended well and proved every update, metrics not finite, rows proved, and
    times."""
    status = run.process.returncode
    file = run.folder / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    trained = [row for row in rows if row["stage"] == "rl"]
    proved = [
        row for row in trained if row.get("replay/rows_verified", 0) > 0 and row.get("replay/updates_unproved") == 0
    ]
    is_whole = status == 0 and len(trained) >= STEPS
    holds = is_whole and len(proved) == len(trained)
    last = ([line for line in output(run).splitlines() if line.strip()] or ["no output"])[-1]
    why = "" if holds else f"; status {status}, {len(proved)} of {len(trained)} steps proved: {last.strip()[:200]}"
    unfit = sorted({f"{row['stage']} {name}" for row in rows for name, value in row.items() if is_unfit(value)})
    shown = f" ({', '.join(unfit[:5])})" if unfit else ""
    results = [
        Result(f"{run.recipe}: replay proved{why}", float(holds), "== 1", holds, "run"),
        Result(f"{run.recipe}: metrics that are not finite{shown}", len(unfit), "== 0", not unfit, "metrics"),
        Result(f"{run.recipe}: routing rows proved", sum(row["replay/rows_verified"] for row in proved), unit="rows"),
        Result(f"{run.recipe}: whole run", run.seconds, unit="s"),
    ]
    for stage, name in (("sft", "cold start"), ("rl", "GRPO")):
        # The first step compiles, or fills caches.
        taken = [row["seconds/step"] for row in rows if row["stage"] == stage][1:]
        if taken:
            results.append(Result(f"{run.recipe}: step of {name}", statistics.median(taken), unit="s"))
    return results


def is_unfit(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
